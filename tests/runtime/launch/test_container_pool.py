"""How many containers are kept ready: as many as were taken at once, for a while, and never too many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.launch.container_pool import (
    CREATED_LEAST,
    CREATED_MOST,
    FAILURE_PAUSES_S,
    PAUSED_MOST,
    REFILL_S,
    REMEMBERED_S,
    SETTLE_S,
    Backoff,
    PoolKey,
    busiest,
    may_refill,
    targets,
)

TIMES = st.lists(st.floats(0, 1000), max_size=30)
PYTHON, TORCH, OWN = PoolKey("python"), PoolKey("torch"), PoolKey("python", "sha256:1")
LAUNCHES = st.dictionaries(st.sampled_from([PYTHON, TORCH, OWN]), TIMES)


def test_without_demand_a_container_is_created_and_none_runs() -> None:
    assert targets({}, 5.0).created == CREATED_LEAST
    assert targets({PYTHON: []}, 5.0).paused == {}


def test_as_many_wait_as_were_taken_at_once() -> None:
    burst = [100.0, 100.1, 100.2]
    found = targets({PYTHON: [*burst, 150.0], TORCH: [120.0]}, 160.0)
    assert found.paused == {PYTHON: 3, TORCH: 1}
    assert found.created == 4


def test_an_image_has_a_pool_of_its_own_and_takes_nothing_that_was_created_for_others() -> None:
    found = targets({PYTHON: [100.0], OWN: [100.0, 100.1]}, 101.0)
    assert found.paused == {PYTHON: 1, OWN: 2}
    assert found.created == 1


def test_demand_is_forgotten() -> None:
    assert targets({PYTHON: [100.0, 100.1]}, 100.1 + REMEMBERED_S).paused == {PYTHON: 1}
    assert targets({PYTHON: [100.0, 100.1]}, 101.0 + REMEMBERED_S).paused == {}


def test_a_start_under_way_is_left_alone() -> None:
    assert may_refill({}, 0.0)
    assert not may_refill({PYTHON: [1.0], TORCH: [9.8]}, 9.8 + SETTLE_S / 2)
    assert may_refill({PYTHON: [1.0], TORCH: [9.8]}, 9.9 + SETTLE_S)


def test_what_fails_again_and_again_waits_longer_and_nothing_else_does() -> None:
    backoff = Backoff()
    assert backoff.may_try(OWN, 0.0)
    now_s = 100.0
    for pause_s in (*FAILURE_PAUSES_S, FAILURE_PAUSES_S[-1]):
        backoff.failed(OWN, now_s)
        assert not backoff.may_try(OWN, now_s + pause_s - 0.1)
        assert backoff.may_try(PYTHON, now_s)
        now_s += pause_s
        assert backoff.may_try(OWN, now_s)
    backoff.succeeded(OWN)
    assert backoff.may_try(OWN, 0.0)
    backoff.failed(OWN, now_s)
    assert backoff.may_try(OWN, now_s + FAILURE_PAUSES_S[0]), "a success begins anew"


@given(LAUNCHES, st.floats(0, 2000))
def test_pools_stay_within_their_bounds(launches: dict[PoolKey, list[float]], now_s: float) -> None:
    found = targets(launches, now_s)
    assert CREATED_LEAST <= found.created <= CREATED_MOST
    assert all(1 <= count <= PAUSED_MOST for count in found.paused.values())
    assert set(found.paused) <= set(launches)


@given(TIMES, st.floats(1000, 1100))
def test_the_busiest_moment_is_that_of_one_of_the_launches(times: list[float], now_s: float) -> None:
    recent = [at for at in times if now_s - at <= REMEMBERED_S]
    within = [sum(first <= at <= first + REFILL_S for at in recent) for first in recent]
    # At the edge of the window, rounding decides on which side of it a launch is.
    outside = [sum(first <= at < first + REFILL_S - 1e-6 for at in recent) for first in recent]
    assert max(outside, default=0) <= busiest(times, now_s) <= max(within, default=0) + 1
