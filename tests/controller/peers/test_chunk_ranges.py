"""Ranges of chunks: unions and differences are those of sets."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.peers.chunk_ranges import Ranges, count, union, without

parts = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def chunks(ranges: list[tuple[int, int]] | Ranges) -> set[int]:
    return {chunk for begin, end in ranges for chunk in range(begin, end)}


@given(parts, parts)
def test_unions_and_differences_are_those_of_sets(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    both = union(some, others)
    assert chunks(both) == chunks(some) | chunks(others)
    assert all(end < begin for (_, end), (begin, _) in pairwise(both)), "apart and in order"
    left = without(union(some), union(others))
    assert chunks(left) == chunks(some) - chunks(others)
    assert count(left) == len(chunks(left))
