"""The sketch of durations: its error, and that parts add up to the whole."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.observability.latency_sketch import (
    BOUNDS_MS,
    EXACT_MS,
    LONGEST_MS,
    STEP,
    bucket_index,
    quantile,
)


@given(durations_ms=st.lists(st.integers(0, 10**6), min_size=1), share=st.sampled_from([0.5, 0.95, 0.99]))
def test_a_quantile_is_at_most_one_step_too_high(durations_ms: list[int], share: float) -> None:
    found = quantile(Counter(map(bucket_index, durations_ms)), share)
    assert found is not None
    ordered = sorted(durations_ms)
    exact = next(value for rank, value in enumerate(ordered, 1) if rank >= share * len(ordered))
    assert exact <= found + 1e-6
    assert found <= max(exact * STEP + 1e-6, exact)


@given(one=st.lists(st.integers(0, 10**10)), other=st.lists(st.integers(0, 10**10)))
def test_the_sum_of_two_sketches_is_the_sketch_of_both(one: list[int], other: list[int]) -> None:
    both = Counter(map(bucket_index, [*one, *other]))
    assert Counter(map(bucket_index, one)) + Counter(map(bucket_index, other)) == both


def test_the_shortest_and_the_longest_have_a_bucket() -> None:
    assert [bucket_index(value) for value in range(EXACT_MS + 1)] == list(range(EXACT_MS + 1))
    assert bucket_index(100 * LONGEST_MS) == len(BOUNDS_MS) - 1
    assert quantile({}, 0.5) is None
