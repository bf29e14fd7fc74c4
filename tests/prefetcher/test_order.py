"""Fetch order against a model: every chunk once, runs that are one range, and whoever is moved first comes first."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.order import FetchOrder, run_length
from fleetstart.runtime.contract.manifest import ChunkRange

SIZE = 4096


def chunks(parts: list[int]) -> list[ChunkRange]:
    """So many chunks in each part; the last of each is short."""
    found: list[ChunkRange] = []
    for number, count in enumerate(parts):
        for at in range(count):
            index = len(found)
            size = SIZE if at < count - 1 else SIZE - 1
            found.append(ChunkRange(index, f"part-{number}", 100 + at * SIZE, index * SIZE, size, 0))
    return found


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from(["run", "first", "back"]), st.integers(0, 30), st.integers(1, 5)), max_size=40),
)
def test_every_chunk_is_taken_once_in_runs_that_are_one_range_of_one_object(
    parts: list[int], steps: list[tuple[str, int, int]]
) -> None:
    everything = chunks(parts)
    order = FetchOrder(everything)
    pending = [chunk.index for chunk in everything]
    taken: list[ChunkRange] = []
    for what, at, count in steps:
        if what == "first":
            wanted = [index for index in range(at, at + count) if index in pending]
            order.first(range(at, at + count))
            pending = wanted + [index for index in pending if index not in wanted]
        elif what == "back" and taken:
            again = taken[-count:]
            del taken[-count:]
            order.put_back(again)
            pending = [chunk.index for chunk in again] + pending
        elif what == "run":
            run = order.next_run(count)
            assert [chunk.index for chunk in run] == pending[: len(run)]
            assert len(run) <= count
            assert bool(run) == bool(pending)
            assert len({chunk.object for chunk in run}) <= 1
            assert all(b.object_offset == a.object_offset + a.size_bytes for a, b in pairwise(run))
            del pending[: len(run)]
            taken += run
        assert len(order) == len(pending)
    assert sorted(pending + [chunk.index for chunk in taken]) == list(range(len(everything)))


@given(st.integers(1, 16), st.integers(0, 10_000), st.integers(1, 16))
def test_runs_are_as_long_as_they_may_be_while_there_is_enough_for_all(most: int, pending: int, threads: int) -> None:
    length = run_length(most, pending, threads)
    assert 1 <= length <= most
    assert length == most or length * threads <= max(pending, threads)
