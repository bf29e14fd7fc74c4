"""A function's own limits: what passes in any window, what one who is refused is told, and how gateways share."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleetstart.controller.gateway.admission.rate_limit import (
    NO_LIMITS,
    TOLERANCE,
    burst_of,
    gateway_share,
    try_acquire,
)
from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.spec import Limits

rates = st.floats(0.01, 1000)
bursts = st.integers(1, 50)


def test_a_burst_passes_and_then_one_at_a_time() -> None:
    limits, due_s = Limits(rate=2, burst=3), 0.0
    waits = []
    for _ in range(5):
        due_s, wait_s = try_acquire(due_s, limits, 100.0)
        waits.append(wait_s)
    assert waits == [0, 0, 0, 0.5, 0.5]
    assert try_acquire(due_s, limits, 100.5).wait_s == 0
    assert try_acquire(due_s, limits, 1000.0).wait_s == 0


@given(rates, bursts, st.lists(st.floats(0, 2), min_size=1, max_size=200))
def test_no_window_lets_more_pass_than_a_burst_and_the_rate(rate: float, burst: int, gaps: list[float]) -> None:
    limits, due_s, now_s = Limits(rate=rate, burst=burst), 0.0, 1000.0
    passed: list[float] = []
    for gap in gaps:
        now_s += gap / rate
        due_s, wait_s = try_acquire(due_s, limits, now_s)
        if not wait_s:
            passed.append(now_s)
    for first, at_s in enumerate(passed):
        for last in range(first, len(passed)):
            assert last - first + 1 <= burst + (passed[last] - at_s) * rate * (1 + 1e-6) + TOLERANCE + 1e-6


@example(794.25, 26, 1)
@given(rates, bursts, st.integers(1, 100))
def test_who_comes_when_he_was_told_passes_and_not_before(rate: float, burst: int, more: int) -> None:
    limits, due_s, now_s = Limits(rate=rate, burst=burst), 0.0, 1000.0
    waits_s: list[float] = []
    for _ in range(burst + more):
        due_s, wait_s = try_acquire(due_s, limits, now_s)
        waits_s.append(wait_s)
    assert not any(waits_s[:burst])
    assert all(waits_s[burst:])
    assert try_acquire(due_s, limits, now_s + wait_s * 0.99).wait_s > 0
    assert try_acquire(due_s, limits, now_s + wait_s + 1e-6).wait_s == 0


@given(rates, st.integers(0, 100), st.integers(0, 100), st.integers(1, 9))
def test_shares_come_to_the_whole_or_one_each(rate: float, burst: int, concurrent: int, gateways: int) -> None:
    limits = Limits(rate=rate, burst=burst, concurrent=concurrent)
    parts = [gateway_share(limits, gateways, place) for place in range(gateways)]
    assert sum(part.rate for part in parts) == pytest.approx(rate)
    assert sum(burst_of(part) for part in parts) == max(burst_of(limits), gateways)
    assert sum(part.concurrent for part in parts) == (max(concurrent, gateways) if concurrent else 0)
    assert max(burst_of(part) for part in parts) - min(burst_of(part) for part in parts) <= 1


def test_no_limits_are_none_at_any_number_of_gateways() -> None:
    assert gateway_share(NO_LIMITS, 3, 0) == NO_LIMITS
    assert burst_of(Limits(rate=0.5)) == 1
    assert burst_of(Limits(rate=2.5)) == 3


@pytest.mark.parametrize("fields", [{"rate": -1}, {"burst": 5}, {"rate": 1, "burst": -1}, {"concurrent": -1}])
def test_limits_that_mean_nothing_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(InvalidSpec, match="limits"):
        Limits(**fields)  # type: ignore[arg-type]
