"""Fetch progress: each chunk belongs to one thread at a time, wanted chunks come first, and the end is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.fetch.chunk_sources import FetchSource
from fleetstart.prefetcher.fetch.progress import ChunkRun, Exhausted, FetchProgress, Retry
from fleetstart.prefetcher.sources.base import Piece
from fleetstart.prefetcher.sources.throttle import BackgroundThrottle
from fleetstart.runtime.contract.weights.manifest import ChunkRange

SIZE = 4096
COUNT = 12
CHUNKS = [ChunkRange(index, "part", index * SIZE, index * SIZE, SIZE, 0) for index in range(COUNT)]


class Unread:
    """A chunk source that is never read; its runs have one chunk."""

    run_bytes = SIZE

    def __init__(self, name: str) -> None:
        self.name = name

    def read(
        self,
        run: Sequence[ChunkRange],
        pieces: Sequence[Piece],
        stopped: Callable[[], bool],
        throttle: BackgroundThrottle | None = None,
    ) -> Iterator[int]:
        raise NotImplementedError


def filling(*, on_disk: int = 0, threads: int = 3) -> FetchProgress:
    lanes = [FetchSource(Unread("store"), CHUNKS, threads, costly=True)]
    if on_disk:
        lanes.insert(0, FetchSource(Unread("disk"), CHUNKS[:on_disk], threads))
    return FetchProgress(lanes, COUNT)


def all_runs(fill: FetchProgress, source_index: int = 0) -> list[ChunkRun]:
    """All runs that one thread would take, none of them finished."""
    runs = []
    while fill.begin_thread(source_index):
        run = fill.next_run(source_index)
        if run is not None:
            runs.append(run)
    return runs


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("want"), st.integers(0, COUNT - 1)),
        st.tuples(st.sampled_from(["grow", "stop growing", "thread", "take"]), st.integers(0, 1)),
        st.tuples(st.sampled_from(["ready", "lose", "fail"]), st.integers(0, 5)),
    ),
    max_size=60,
)


@given(on_disk=st.integers(0, 4), steps=STEPS)
def test_each_chunk_is_one_thread_s_at_a_time_and_nothing_grows_while_somebody_waits(
    on_disk: int, steps: list[tuple[str, int]]
) -> None:
    fill = filling(on_disk=on_disk)
    lanes = 2 if on_disk else 1
    threads = [0, 0]
    under_way: list[ChunkRun] = []
    wanted: set[int] = set()
    there: set[int] = set()
    for what, number in steps:
        if what == "want":
            wanted.add(number)
            fill.want([number])
        elif what == "grow":
            fill.grow()
        elif what == "stop growing":
            fill.stop_growing()
        elif what == "thread" and number < lanes:
            threads[number] += fill.begin_thread(number)
        elif what == "take" and number < lanes and threads[number]:
            run = fill.next_run(number)
            threads[number] -= 1
            if run is None:
                continue
            taken = {chunk.index for other in under_way for chunk in other.chunks}
            assert not taken & {chunk.index for chunk in run.chunks}
            assert run.wanted or (fill.is_growing and wanted <= there)
            under_way.append(run)
        elif what in ("ready", "lose", "fail") and number < len(under_way):
            run = under_way.pop(number)
            threads[run.source_index] += 1
            (chunk,) = run.chunks
            if what == "ready":
                fill.ready(chunk)
                there.add(chunk.index)
            elif what == "lose":
                fill.put_back(run.chunks)
            else:
                outcome = fill.failed(run.source_index, chunk, (0.0,))
                assert isinstance(outcome, Retry) or outcome.wanted == (chunk.index in wanted)
                fill.put_back([chunk])
            event = fill.finish_run(run)
            assert not event.filled or wanted <= there
            assert not event.grown or len(there) == COUNT
        assert fill.is_filled == (wanted <= there)
        assert fill.has(there)
        assert fill.unwanted(range(COUNT)) == [index for index in range(COUNT) if index not in wanted | there]
        assert fill.ready_bytes == len(there) * SIZE
        assert fill.running == sum(threads) + len(under_way)


def test_all_threads_fetch_what_is_wanted_and_one_what_grows() -> None:
    fill = filling()
    fill.want([3, 4, 5, 6])
    fill.grow()
    runs = all_runs(fill)
    assert [(run.chunks[0].index, run.wanted) for run in runs] == [(3, True), (4, True), (5, True)]
    assert fill.running == 3

    for run in runs:
        fill.ready(run.chunks[0])
        assert not fill.finish_run(run).filled
    last = fill.next_run(0)
    assert last is not None
    assert [fill.next_run(0), fill.next_run(0)] == [None, None], "it is not there yet"
    fill.ready(last.chunks[0])
    assert fill.finish_run(last).filled
    grows = fill.next_run(0)
    assert grows is not None
    assert not grows.wanted
    assert not fill.begin_thread(0)


def test_that_all_has_come_is_told_once_and_again_when_more_was_wanted() -> None:
    fill = filling()
    for chunk in CHUNKS[:2]:
        fill.want([chunk.index])
        (run,) = all_runs(fill)
        fill.ready(chunk)
        assert fill.finish_run(run).filled
    fill.want([0])
    assert all_runs(fill) == []


def test_a_chunk_that_fails_is_tried_again_then_elsewhere_then_nowhere() -> None:
    fill = filling(on_disk=1)
    chunk = CHUNKS[0]
    fill.want([0])
    assert fill.failed(0, chunk, (0.5,)) == Retry(0, chunk, 0.5)
    assert fill.failed(0, chunk, (0.5,)) == Retry(1, chunk, 0.0)
    assert fill.failed(1, chunk, ()) == Exhausted(1, wanted=True)
    assert fill.failed(1, CHUNKS[5], ()) == Exhausted(1, wanted=False)
    assert fill.failed(1, CHUNKS[5], ()) == Exhausted(1, wanted=False), "nobody waited: it is tried anew"


@pytest.mark.parametrize("grows", [False, True])
def test_after_the_end_there_is_nothing_to_do(grows: bool) -> None:
    fill = filling()
    fill.want(range(4))
    assert fill.begin_thread(0)
    fill.stop()
    if grows:
        fill.grow()
    assert fill.next_run(0) is None
    assert not fill.begin_thread(0)
    assert fill.running == 0
    assert not fill.is_growing
