"""The pool's state machine, by tables and by simulated lives."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.scheduler.worker_pool import (
    CLOCKS_APART_MS,
    HALF_OPEN_MS,
    PHASES,
    Decision,
    ImpossibleWorkerState,
    Member,
    backoff_ms,
    broken,
    decide,
    failure_after,
)
from fleetstart.controller.state.records import Failure
from fleetstart.runtime.contract.errors import DeviceOutOfMemory, ErrorInfo
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.orders import WorkerState
from tests.controller.scheduler.test_autoscaler import spec

SPEC = spec(start_timeout_s=10.0, timeout_s=5.0)
NOW = 1_000_000_000
BOOM = ErrorInfo(code="start_failed", message="boom")


def member(name: str, state: Any = "ready", wanted: Any = "run", **fields: Any) -> Member:
    return Member(worker=WorkerId(name), wanted=wanted, state=state, ordered_unix_ms=NOW - 100, **fields)


def run(
    desired: int, *members: Member, failure: Failure | None = None, now: int = NOW, standby_s: float = 0.0
) -> Decision:
    return decide(spec=SPEC, desired=desired, members=members, failure=failure, now_unix_ms=now, standby_s=standby_s)


def failed(count: int, ago_ms: int = 0, code: str = "start_failed") -> Failure:
    return Failure(count=count, last_unix_ms=NOW - ago_ms, error=ErrorInfo(code=code, message="boom"))


@pytest.mark.parametrize(
    ("desired", "members", "expected"),
    [
        (0, [], Decision()),
        (2, [], Decision(start=2)),
        (2, [member("a", None)], Decision(start=1)),
        (2, [member("a", "starting"), member("b")], Decision()),
        (1, [member("a", "draining", wanted="drain")], Decision(start=1)),
        (0, [member("a")], Decision(drain=(WorkerId("a"),))),
        (1, [member("a", running=1), member("b")], Decision(drain=(WorkerId("b"),))),
        (1, [member("a"), member("b", "starting")], Decision(drain=(WorkerId("b"),))),
        (0, [member("a", "gone", wanted="drain")], Decision(delete_orders=(WorkerId("a"),))),
        (1, [member("a", "gone")], Decision(start=1, delete_orders=(WorkerId("a"),))),
        (1, [member("a", "failed", served=True)], Decision(start=1, delete_orders=(WorkerId("a"),))),
        (1, [member("a", lost=True)], Decision(start=1, delete_orders=(WorkerId("a"),))),
    ],
)
def test_decisions(desired: int, members: list[Member], expected: Decision) -> None:
    assert run(desired, *members) == expected


def resting(name: str, age_s: float = 1.0, state: Any = "standby", **fields: Any) -> Member:
    return member(name, state, "standby", age_ms=round(age_s * 1000), served=True, **fields)


@pytest.mark.parametrize(
    ("desired", "members", "expected"),
    [
        (0, [member("a")], Decision(stand_by=(WorkerId("a"),))),
        (0, [member("a", staged=True)], Decision(drain=(WorkerId("a"),))),
        (0, [member("a", "starting")], Decision(drain=(WorkerId("a"),))),
        (1, [resting("a"), resting("b", 2)], Decision(wake=(WorkerId("a"),), again_unix_ms=NOW + 58_000)),
        (3, [resting("a"), resting("b")], Decision(start=1, wake=(WorkerId("a"), WorkerId("b")))),
        (1, [member("a"), resting("b")], Decision(again_unix_ms=NOW + 59_000)),
        (1, [member("a", "standby")], Decision()),  # it is woken
        (0, [resting("a", 60)], Decision(drain=(WorkerId("a"),))),
        (1, [resting("a", 60)], Decision(wake=(WorkerId("a"),))),
        (1, [resting("a", state="failed")], Decision(start=1, delete_orders=(WorkerId("a"),))),
        (1, [resting("a", lost=True)], Decision(start=1, delete_orders=(WorkerId("a"),))),
        (1, [member("a", "failed", served=True)], Decision(start=1, delete_orders=(WorkerId("a"),))),  # of a wake
    ],
)
def test_a_surplus_worker_stands_by_and_is_woken_before_another_is_started(
    desired: int, members: list[Member], expected: Decision
) -> None:
    assert run(desired, *members, standby_s=60) == expected


def test_without_a_time_for_it_a_standby_ends() -> None:
    assert run(0, resting("a")) == Decision(drain=(WorkerId("a"),))


def test_a_wake_that_exceeds_the_time_of_a_start_is_taken_back() -> None:
    decision = run(1, member("a", "standby", served=True, age_ms=16_000), standby_s=60)
    assert decision.drain == (WorkerId("a"),)


def test_a_failed_start_waits_then_is_tried_alone() -> None:
    first = run(3, member("a", "failed", error=BOOM))
    assert first.failure == failed(1)
    assert first.start == 0
    assert first.again_unix_ms == NOW + backoff_ms(1)
    assert run(3, failure=failed(1, ago_ms=499)).start == 0
    assert run(3, failure=failed(1, ago_ms=500)).start == 1
    assert run(3, member("b", "starting"), failure=failed(1, ago_ms=500)).start == 0
    assert run(3, member("b"), failure=failed(1, ago_ms=500)).start == 1


def test_three_failures_break_a_version_until_it_is_half_open() -> None:
    third = run(1, member("a", "failed", error=BOOM), failure=failed(2, ago_ms=2000))
    assert third.failure is not None
    assert third.failure.count == 3
    assert broken(third.failure, NOW)
    assert run(1, failure=failed(3, ago_ms=HALF_OPEN_MS - 1)).start == 0
    assert run(5, failure=failed(3, ago_ms=HALF_OPEN_MS)).start == 1
    again = run(1, member("a", "failed", error=BOOM), failure=failed(3, ago_ms=HALF_OPEN_MS))
    assert again.failure is not None
    assert broken(again.failure, NOW)


def test_failures_that_lie_ahead_are_of_before_a_clock_stepped_back() -> None:
    assert broken(failed(3, ago_ms=-1000), NOW), "the clocks of two controllers differ a little"
    for ahead_ms in (CLOCKS_APART_MS, HALF_OPEN_MS - 1, HALF_OPEN_MS):
        assert not broken(failed(3, ago_ms=-ahead_ms), NOW)
        assert run(1, failure=failed(1, ago_ms=-ahead_ms)).start == 1
    assert broken(failed(3, ago_ms=1 - CLOCKS_APART_MS), NOW)


def test_what_the_user_must_mend_breaks_at_once() -> None:
    assert broken(failure_after(None, ErrorInfo(code="no_handler", message=""), NOW), NOW)
    assert not broken(failure_after(None, ErrorInfo(code="checksum_mismatch", message=""), NOW), NOW)


def test_a_worker_that_got_ready_after_the_failure_cures_it() -> None:
    assert run(1, member("a", ready_unix_ms=NOW), failure=failed(2, ago_ms=10)).clear_failure
    assert not run(1, member("a", ready_unix_ms=NOW - 20), failure=failed(2, ago_ms=10)).clear_failure


def test_a_start_that_exceeds_its_time_is_taken_back_and_counted_once() -> None:
    late = run(1, member("a", "starting", age_ms=15_001))
    assert not run(1, member("a", "starting", age_ms=15_000)).drain
    assert late.drain == (WorkerId("a"),)
    assert late.failure is not None
    after = run(1, member("a", "failed", wanted="drain", error=BOOM), failure=late.failure)
    assert after.failure is None
    assert after.delete_orders == (WorkerId("a"),)


def test_a_drained_worker_that_never_ends_is_taken_back() -> None:
    early, late = (run(0, member("a", "draining", wanted="drain", age_ms=age_ms)) for age_ms in (60_000, 66_000))
    assert (early.delete_orders, late.delete_orders) == ((), (WorkerId("a"),))


@pytest.mark.parametrize("wanted", ["run", "standby", "drain"])
@pytest.mark.parametrize("state", [None, *get_args(WorkerState)])
def test_every_pair_of_wanted_and_reported_state_has_a_phase(wanted: str, state: str | None) -> None:
    assert member("a", state, wanted).phase == PHASES[wanted, state]


def test_a_worker_in_an_impossible_state_is_replaced_and_reported() -> None:
    broken_one = member("a", "paused", reported_unix_ms=NOW - 50, served=True, running=2, error=BOOM)
    with pytest.raises(ImpossibleWorkerState) as caught:
        _ = broken_one.phase
    story = str(caught.value)
    for part in (
        "worker a", "ordered to run at 1970-01-12T13:46:39.900+00:00", "reported paused at 1970-01-12T13:46:39.950",
        "was ready before", "2 calls", "start_failed: boom",
    ):  # fmt: skip
        assert part in story
    decision = run(2, broken_one, member("b"))
    assert decision == Decision(start=1, delete_orders=(WorkerId("a"),), impossible=(story,))


@given(st.integers(1, 100))
def test_backoff_grows_and_is_capped(count: int) -> None:
    assert 500 <= backoff_ms(count) <= backoff_ms(count + 1) <= 30_000


@given(
    st.integers(0, 6),
    st.lists(
        st.tuples(
            st.sampled_from([None, *get_args(WorkerState)]),
            st.sampled_from(["run", "standby", "drain"]),
            st.booleans(),
            st.booleans(),
            st.integers(0, 3),
        ),
        max_size=8,
    ),
    st.one_of(st.none(), st.builds(failed, st.integers(1, 5), st.integers(0, 100_000))),
    st.sampled_from([0.0, 60.0]),
)
def test_never_more_alive_than_desired_after_a_step_and_nobody_is_told_two_things(
    desired: int, rows: list[Any], failure: Failure | None, standby_s: float
) -> None:
    members = [
        member(f"w{i}", state, wanted, lost=lost, served=served, running=running, error=BOOM)
        for i, (state, wanted, lost, served, running) in enumerate(rows)
    ]
    decision = run(desired, *members, failure=failure, standby_s=standby_s)
    told = [*decision.drain, *decision.delete_orders, *decision.stand_by, *decision.wake]
    assert len(set(told)) == len(told)
    running = {m.worker for m in members if m.wanted == "run"} | set(decision.wake)
    left = running - {*decision.drain, *decision.delete_orders, *decision.stand_by}
    assert len(left) + decision.start <= max(desired, 0)
    if failure is None and decision.failure is None:
        assert len(left) + decision.start == desired


def test_starts_that_lack_device_memory_break_nothing_and_are_tried_again() -> None:
    lack = DeviceOutOfMemory("out of device memory").info()
    failure = None
    for _ in range(10):
        failure = failure_after(failure, lack, 0)
        assert failure.count == 1
        assert not broken(failure, 0)
    other = failure_after(failure_after(failure_after(None, BOOM, 0), BOOM, 0), lack, 0)
    assert other.count == 2
    assert other.error == lack
