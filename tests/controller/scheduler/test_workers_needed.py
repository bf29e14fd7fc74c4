"""Simulated seconds of calls: how many workers they need, and how many of a pipeline grow."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.scheduler.autoscaler import (
    GATHERED_MOST,
    ScaleUpWindow,
    consolidation_count,
    quiet_ns,
    workers_needed,
)
from fleetstart.runtime.contract.function.spec import FunctionSpec, Scale
from tests.controller.scheduler.test_autoscaler import spec


def four(**fields: object) -> FunctionSpec:
    return spec(concurrency=4, scale=Scale(max=20), **fields)


@pytest.mark.parametrize(
    ("queued", "running", "predicted", "call_s", "expected"),
    [
        (0, 0, 0, 1.0, 0),
        (1, 0, 0, 1.0, 1),
        (8, 0, 0, 1.0, 2),  # the queue alone
        (8, 0, 8, 20.0, 4),  # calls longer than a window keep their place: as in the paper
        (0, 0, 1000, 0.01, 1),  # a thousand short calls are one place
        (4, 0, 2, 0.01, 1),  # and two are none
        (1, 4, 4, 20.0, 2),  # those that run are those that were predicted
        (500, 0, 0, 1.0, 20),  # never more than the function may have
    ],
)
def test_need_is_the_queue_and_what_is_expected(
    queued: int, running: int, predicted: int, call_s: float, expected: int
) -> None:
    assert workers_needed(queued=queued, running=running, predicted=predicted, call_s=call_s, spec=four()) == expected


def test_one_grows_by_default_and_more_if_they_are_needed() -> None:
    assert consolidation_count(group=4, full=4, needed=1, others=0) == 1, "scale down"
    assert consolidation_count(group=4, full=4, needed=3, others=0) == 3
    assert consolidation_count(group=4, full=4, needed=9, others=0) == 4
    assert consolidation_count(group=4, full=2, needed=9, others=0) == 2, "the others have no memory for it"
    assert consolidation_count(group=4, full=4, needed=3, others=2) == 1
    assert consolidation_count(group=4, full=0, needed=0, others=5) == 1, "somebody must go on with the streams"


QUIET_NS = 50_000_000


def decisions(gaps_ns: list[int], quiet_ns: int, each: int) -> list[tuple[int, int]]:
    """(time, workers ordered) of each decision about calls that come after such gaps, one worker for `each` of them.
    The window is asked with each call, and at the time that it names."""
    window, ordered, calls, found = ScaleUpWindow(), 0, 0, list[tuple[int, int]]()

    def asked(now_ns: int) -> int:
        nonlocal ordered
        missing = calls // each - ordered
        wait_ns = window.wait_ns(missing=missing, calls=calls, now_ns=now_ns, quiet_ns=quiet_ns)
        if missing > 0 and not wait_ns:
            ordered += missing
            found.append((now_ns, missing))
            window.wait_ns(missing=0, calls=calls, now_ns=now_ns, quiet_ns=quiet_ns)
        return wait_ns

    now_ns, wait_ns = 0, 0
    for gap_ns in [*gaps_ns, None]:
        come_ns = now_ns + gap_ns if gap_ns is not None else sys.maxsize
        while wait_ns and now_ns + wait_ns <= come_ns:
            now_ns += wait_ns
            wait_ns = asked(now_ns)
        if gap_ns is not None:
            now_ns, calls = come_ns, calls + 1
            wait_ns = asked(now_ns)
    return found


gaps = st.lists(st.integers(0, 3 * QUIET_NS), max_size=60)


@given(gaps, st.integers(1, 16))
def test_a_gathered_scale_up_orders_as_many_workers_in_no_more_decisions_and_waits_no_longer_than_it_may(
    gaps_ns: list[int], each: int
) -> None:
    at_once, gathered = decisions(gaps_ns, 0, each), decisions(gaps_ns, QUIET_NS, each)
    assert sum(count for _, count in gathered) == sum(count for _, count in at_once)
    assert len(gathered) <= len(at_once)
    wanted_ns = [now_ns for now_ns, count in at_once for _ in range(count)]
    ordered_ns = [now_ns for now_ns, count in gathered for _ in range(count)]
    for wanted, ordered in zip(wanted_ns, ordered_ns, strict=True):
        assert wanted <= ordered <= wanted + GATHERED_MOST * QUIET_NS


@given(st.lists(st.integers(0, QUIET_NS // 16), min_size=1, max_size=60), st.integers(1, 16))
def test_a_burst_is_one_decision(gaps_ns: list[int], each: int) -> None:
    assert len(decisions(gaps_ns, QUIET_NS, each)) <= 1


def test_a_scale_up_waits_for_a_small_part_of_what_its_weights_take() -> None:
    assert quiet_ns(1_000_000, 100e6) == 500_000
    assert quiet_ns(75_000_000, 7.5e6) == 200_000_000
    assert quiet_ns(10**12, 7.5e6) == 1_000_000_000
