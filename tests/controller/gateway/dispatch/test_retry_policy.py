"""The decision whether a call runs again after its worker was lost, over tables of causes."""

from __future__ import annotations

import pytest

from fleetstart.controller.gateway.dispatch.retry_policy import (
    CLOSED,
    UNENTERED_DEATHS_ALLOWED,
    LostWorkers,
    give_up,
)
from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, FunctionName, NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.entered_calls import EnteredCalls, digest_of
from fleetstart.runtime.contract.node.orders import WorkerStatus


def spec(retries: int) -> FunctionSpec:
    return FunctionSpec(name=FunctionName("f"), bundle=BundleId("b"), entry="handler:f", retries=retries)


def ended(code: str = "", *, drained: bool = False, entered: EnteredCalls | None = None) -> WorkerStatus:
    return WorkerStatus(
        worker=WorkerId("w"), node=NodeId("n"), function=FunctionName("f"), version=Version(1), drained=drained,
        entered=entered,
        state="failed" if code else "gone", error=ErrorInfo(code=code, message="why") if code else None,
    )  # fmt: skip


@pytest.mark.parametrize(("retries", "lost", "code", "raised"), [
    (0, 1, "worker_lost", "worker_lost"),
    (0, 1, "", "worker_lost"),
    (2, 1, "worker_lost", None),
    (2, 2, "", None),
    (2, 3, "worker_lost", "worker_lost"),
    (2, 1, "out_of_memory", "out_of_memory"),
    (10, 1, "out_of_memory", "out_of_memory"),
])  # fmt: skip
def test_a_call_is_repeated_as_often_as_its_function_says_and_never_after_too_much_memory(
    retries: int, lost: int, code: str, raised: str | None
) -> None:
    failure = give_up(spec(retries), lost, ended(code) if code else None, CLOSED)
    assert (failure.code if failure is not None else None) == raised


def test_the_error_names_the_cause_and_what_would_allow_a_repetition() -> None:
    run = give_up(spec(0), 1, ended("worker_lost"), CLOSED, is_async=True)
    assert run is not None
    assert "run again" not in (run.info().hint or ""), "an async call is"
    failure = give_up(spec(0), 1, ended("worker_lost"), CLOSED)
    assert failure is not None
    assert failure.message == "function f: its worker ended under this call: why"
    assert "retries=2" in failure.hint


ENTERED_MINE = EnteredCalls(count=3, latest=digest_of("a") + digest_of("mine") + digest_of("b"))
OTHERS = EnteredCalls(count=2, latest=digest_of("a") + digest_of("b"))
FORGOTTEN = EnteredCalls(count=9, latest=digest_of("a") + digest_of("b"))


@pytest.mark.parametrize(("status", "known", "again"), [
    (None, 0, False),
    (ended(), 0, False),
    (ended("worker_lost"), 0, False),
    (ended(drained=True), 0, True),
    (ended("worker_lost", entered=EnteredCalls(count=0)), 0, True),
    (ended("out_of_memory", entered=OTHERS), 0, True),
    (ended("worker_lost", entered=ENTERED_MINE), 0, False),
    (ended("worker_lost", entered=FORGOTTEN), 7, True),
    (ended("worker_lost", entered=FORGOTTEN), 6, False),
])  # fmt: skip
def test_only_a_call_that_its_worker_cannot_have_begun_is_repeated_of_itself(
    status: WorkerStatus | None, known: int, again: bool
) -> None:
    failure = LostWorkers().count(spec(0), "mine", known, status, CLOSED)
    assert (failure is None) == again


def test_a_call_that_workers_die_of_before_they_enter_it_ends() -> None:
    lost = LostWorkers()
    unentered = ended("worker_lost", entered=OTHERS)
    for _ in range(UNENTERED_DEATHS_ALLOWED):
        assert lost.count(spec(0), "mine", 0, unentered, CLOSED) is None
    assert lost.count(spec(0), "mine", 0, unentered, CLOSED) is not None
