"""What a worker may ask for first: never more than it may need, nothing twice, and not for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.segments.chunk_requests import LOOKS_A_CHUNK, ChunkRequests

NEEDED = st.sets(st.integers(0, 40), max_size=30)
ASKED = st.lists(st.tuples(st.integers(-5, 50), st.integers(-5, 1 << 40)), max_size=20)


@given(NEEDED, ASKED)
def test_only_what_it_may_need_comes_first_and_each_chunk_once(needed: set[int], asked: list[tuple[int, int]]) -> None:
    requests = ChunkRequests(needed)
    seen: list[int] = []
    for first, last in asked:
        for begin, end in requests.admit(first, last):
            assert first <= begin <= end <= last
            seen += range(begin, end + 1)
    assert len(seen) == len(set(seen))
    assert set(seen) <= needed


@given(st.lists(st.integers(0, 30), min_size=1, unique=True))
def test_who_asks_for_each_chunk_that_he_waits_for_gets_it(order: list[int]) -> None:
    requests = ChunkRequests(order)
    assert [requests.admit(chunk, chunk) for chunk in order] == [[(chunk, chunk)] for chunk in order]


def test_a_range_comes_as_a_range() -> None:
    assert ChunkRequests(range(100)).admit(10, 19) == [(10, 19)]


def test_requests_end_with_the_looks_that_they_cost() -> None:
    requests = ChunkRequests(range(1000))
    assert requests.admit(0, 998) == [(0, 998)]
    for _ in range(LOOKS_A_CHUNK):
        requests.admit(0, 998)
    assert requests.admit(0, 999) == []
