"""Simulated seconds of calls: how many workers they need, and how many of a pipeline grow."""

from __future__ import annotations

import pytest

from fleetstart.controller.scheduler.autoscaler import consolidation_count, workers_needed
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
