"""Fetch order against a model: every chunk once, runs that are one range, wanted chunks first."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.fetch.order import FetchOrder, ranges_of, run_length
from fleetstart.runtime.contract.weights.manifest import ChunkRange

SIZE = 4096


def chunks(parts: list[int]) -> list[ChunkRange]:
    """Chunks of several parts; the last chunk of each part is short."""
    found: list[ChunkRange] = []
    for number, count in enumerate(parts):
        for at in range(count):
            index = len(found)
            size = SIZE if at < count - 1 else SIZE - 1
            found.append(ChunkRange(index, f"part-{number}", 100 + at * SIZE, index * SIZE, size, 0))
    return found


STEPS = st.tuples(st.sampled_from(["run", "rest", "first", "back", "want"]), st.integers(0, 30), st.integers(1, 5))


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.sets(st.integers(0, 30)),
    st.lists(STEPS, max_size=40),
)
def test_every_chunk_is_taken_once_in_runs_that_are_one_range_of_one_object(
    parts: list[int], at_first: set[int], steps: list[tuple[str, int, int]]
) -> None:
    everything = chunks(parts)
    order = FetchOrder(everything)
    order.want(sorted(at_first))
    wanted = set(at_first)
    pending = [chunk.index for chunk in everything if chunk.index in wanted]
    rest = [chunk.index for chunk in everything if chunk.index not in wanted]
    taken: list[ChunkRange] = []
    for what, at, count in steps:
        span = range(at, at + count)
        if what == "first":
            moved = [index for index in span if index in pending]
            order.prioritize(span)
            pending = moved + [index for index in pending if index not in moved]
        elif what == "want":
            order.want(span)
            wanted |= set(span)
            pending += [index for index in span if index in rest]
            rest = [index for index in rest if index not in span]
        elif what == "back" and taken:
            again = taken[-count:]
            del taken[-count:]
            order.put_back(again)
            pending = [chunk.index for chunk in again if chunk.index in wanted] + pending
            rest = [chunk.index for chunk in again if chunk.index not in wanted] + rest
        elif what in ("run", "rest"):
            here = pending if what == "run" else rest
            run = order.next_run(count * SIZE) if what == "run" else order.next_background_run(count * SIZE)
            assert [chunk.index for chunk in run] == here[: len(run)]
            assert sum(chunk.size_bytes for chunk in run) <= count * SIZE
            assert bool(run) == bool(here)
            assert len({chunk.object for chunk in run}) <= 1
            assert all(b.object_offset == a.object_offset + a.size_bytes for a, b in pairwise(run))
            del here[: len(run)]
            taken += run
        assert (len(order), order.background_count) == (len(pending), len(rest))
        assert order.pending_bytes == sum(everything[index].size_bytes for index in pending)
    assert sorted(pending + rest + [chunk.index for chunk in taken]) == list(range(len(everything)))


def test_a_chunk_larger_than_a_run_is_one_all_the_same() -> None:
    order = FetchOrder(chunks([3]))
    order.want(range(3))
    assert [chunk.index for chunk in order.next_run(1)] == [0]
    assert [chunk.index for chunk in order.next_run(2 * SIZE)] == [1, 2]


@given(st.integers(1, 1 << 24), st.integers(0, 1 << 40), st.integers(1, 16))
def test_runs_are_as_long_as_they_may_be_while_there_is_enough_for_all(most: int, pending: int, threads: int) -> None:
    length = run_length(most, pending, threads)
    assert 1 <= length <= most
    assert length == most or length * threads <= max(pending, threads)


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_what_was_given_and_do_not_touch(indices: set[int]) -> None:
    ranges = ranges_of(sorted(indices))
    assert [index for begin, end in ranges for index in range(begin, end)] == sorted(indices)
    assert all(a[1] < b[0] for a, b in pairwise(ranges))
