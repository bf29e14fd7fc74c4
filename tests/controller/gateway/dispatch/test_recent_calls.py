"""Simulated seconds of calls at one gateway."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.gateway.dispatch.recent_calls import SLICE_NS, RecentCalls

SECOND = 1_000_000_000


def test_only_the_last_seconds_count() -> None:
    recent = RecentCalls(10 * SECOND)
    assert recent.count(0) == 0
    for _ in range(5000):
        recent.add(0)
    assert recent.count(9 * SECOND) == 5000
    assert recent.count(10 * SECOND) == 0
    recent.add(60 * SECOND)
    assert recent.count(60 * SECOND) == 1, "what came long ago is no call of now"


@given(st.lists(st.integers(0, 3 * SECOND), max_size=50), st.integers(0, 20 * SECOND))
def test_the_count_is_that_of_the_window_but_for_a_slice(steps_ns: list[int], wait_ns: int) -> None:
    recent, now_ns, seen = RecentCalls(10 * SECOND), 0, []
    for step_ns in steps_ns:
        now_ns += step_ns
        recent.add(now_ns)
        seen.append(now_ns)
    now_ns += wait_ns
    within = sum(at_ns > now_ns - 10 * SECOND for at_ns in seen)
    surely = sum(at_ns > now_ns - 10 * SECOND + SLICE_NS for at_ns in seen)
    assert surely <= recent.count(now_ns) <= within
