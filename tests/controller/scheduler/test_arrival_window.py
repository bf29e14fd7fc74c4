"""Simulated seconds of calls: how many workers they need, and how many of a pipeline grow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.scheduler.autoscaler import ArrivalWindow, consolidation_count, workers_needed
from fleetstart.runtime.contract.function.spec import FunctionSpec, Scale
from tests.controller.scheduler.test_autoscaler import spec


def four(**fields: object) -> FunctionSpec:
    return spec(concurrency=4, scale=Scale(max=20), **fields)


def test_the_last_window_predicts_the_next() -> None:
    arrivals = ArrivalWindow(window_s=10)
    assert arrivals.predicted(0) == 0
    arrivals.observe(7, 0.5)
    assert arrivals.predicted(0.5) == 0, "a new scheduler knows of none"
    arrivals.observe(10, 1.0)
    arrivals.observe(10, 2.0)
    arrivals.observe(15, 4.0)
    arrivals.observe(2, 4.5)
    assert arrivals.predicted(10.9) == 8
    assert arrivals.predicted(11.0) == 5
    assert arrivals.predicted(14.0) == 0


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 9)), max_size=30), st.floats(0, 20))
def test_the_prediction_is_the_count_of_the_window(steps: list[tuple[float, int]], wait_s: float) -> None:
    arrivals, now_s, seen, total = ArrivalWindow(window_s=10), 0.0, [], 0
    arrivals.observe(0, 0.0)
    for step_s, count in steps:
        now_s += step_s
        total += count
        arrivals.observe(total, now_s)
        seen.append((now_s, count))
    now_s += wait_s
    assert arrivals.predicted(now_s) == sum(count for at_s, count in seen if at_s > now_s - 10)


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
