"""The decision whether a call runs again after its worker was lost, over tables of causes."""

from __future__ import annotations

import pytest

from fleetstart.controller.gateway.dispatch.retry_policy import CLOSED, give_up, never_ran
from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, FunctionName, NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerStatus


def spec(retries: int) -> FunctionSpec:
    return FunctionSpec(name=FunctionName("f"), bundle=BundleId("b"), entry="handler:f", retries=retries)


def ended(code: str = "", *, drained: bool = False) -> WorkerStatus:
    return WorkerStatus(
        worker=WorkerId("w"), node=NodeId("n"), function=FunctionName("f"), version=Version(1), drained=drained,
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
    failure = give_up(spec(0), 1, ended("worker_lost"), CLOSED)
    assert failure is not None
    assert failure.message == "function f: its worker ended under this call: why"
    assert "retries=2" in failure.hint


def test_only_a_worker_that_ended_in_order_cannot_have_begun_the_call() -> None:
    assert never_ran(ended(drained=True))
    assert not never_ran(ended())
    assert not never_ran(ended("worker_lost"))
    assert not never_ran(None)
