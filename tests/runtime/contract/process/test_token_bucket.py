"""The token bucket: what passes in any window, and what a refused taker is told."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from fleetstart.runtime.contract.process.token_bucket import NEVER_S, TOLERANCE, TokenBucket, take_token

rates = st.floats(0.01, 1000)
bursts = st.integers(1, 50)


def test_a_burst_passes_and_then_one_at_a_time() -> None:
    due_s = 0.0
    waits = []
    for _ in range(5):
        due_s, wait_s = take_token(due_s, per_s=2, burst=3, now_s=100.0)
        waits.append(wait_s)
    assert waits == [0, 0, 0, 0.5, 0.5]
    assert take_token(due_s, per_s=2, burst=3, now_s=100.5).wait_s == 0
    assert take_token(due_s, per_s=2, burst=3, now_s=1000.0).wait_s == 0


@given(rates, bursts, st.lists(st.floats(0, 2), min_size=1, max_size=200))
def test_no_window_lets_more_pass_than_a_burst_and_the_rate(rate: float, burst: int, gaps: list[float]) -> None:
    due_s, now_s = 0.0, 1000.0
    passed: list[float] = []
    for gap in gaps:
        now_s += gap / rate
        due_s, wait_s = take_token(due_s, per_s=rate, burst=burst, now_s=now_s)
        if not wait_s:
            passed.append(now_s)
    for first, at_s in enumerate(passed):
        for last in range(first, len(passed)):
            assert last - first + 1 <= burst + (passed[last] - at_s) * rate * (1 + 1e-6) + TOLERANCE + 1e-6


@example(794.25, 26, 1)
@given(rates, bursts, st.integers(1, 100))
def test_who_comes_when_he_was_told_passes_and_not_before(rate: float, burst: int, more: int) -> None:
    due_s, now_s = 0.0, 1000.0
    waits_s: list[float] = []
    for _ in range(burst + more):
        due_s, wait_s = take_token(due_s, per_s=rate, burst=burst, now_s=now_s)
        waits_s.append(wait_s)
    assert not any(waits_s[:burst])
    assert all(waits_s[burst:])
    assert take_token(due_s, per_s=rate, burst=burst, now_s=now_s + wait_s * 0.99).wait_s > 0
    assert take_token(due_s, per_s=rate, burst=burst, now_s=now_s + wait_s + 1e-6).wait_s == 0


def test_a_bucket_without_a_rate_gives_nothing() -> None:
    assert take_token(0.0, per_s=0, burst=5, now_s=1000.0) == (0.0, NEVER_S)


@given(st.floats(0, 0.99))
def test_a_bucket_holds_one_token_at_least(burst: float) -> None:
    due_s, wait_s = take_token(0.0, per_s=0.5, burst=burst, now_s=1000.0)
    assert wait_s == 0
    assert take_token(due_s, per_s=0.5, burst=burst, now_s=1000.0).wait_s == 2.0


def test_a_bucket_counts_what_it_refused() -> None:
    bucket = TokenBucket(per_s=10, burst=5)
    assert [bucket.try_take(0.0) for _ in range(8)] == [True] * 5 + [False] * 3
    assert bucket.try_take(0.1)
    assert bucket.pop_refused() == 3
    assert not bucket.try_take(0.1)
    assert (bucket.pop_refused(), bucket.pop_refused()) == (1, 0)
