"""Fetches with several sources: every chunk comes, once, whatever peers do, and no thread waits where there is work."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.prefetcher.fetch.choice import FIRST_FACTOR, PLANNED_PATIENCE_S
from fleetstart.prefetcher.fetch.chunk_sources import FetchSource
from fleetstart.prefetcher.fetch.progress import ChunkRun, FetchProgress, Retry
from fleetstart.prefetcher.fetch.pulls import PullPlan
from tests.prefetcher.fetch.test_progress import CHUNKS, COUNT, Unread

CHUNK_SETS = st.sets(st.integers(0, COUNT - 1))
PEERS = st.lists(st.tuples(CHUNK_SETS, st.none() | st.sampled_from([1e3, 1e6, 1e9])), max_size=3)
PULLS = st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, COUNT - 1), max_size=3)), max_size=6)
OUTCOMES = st.sampled_from(["ready", "ready", "ready", "fail", "corrupt", "lose", "late", "lost"])


class Clock:
    """Time that the test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def peer(name: str, chunks: set[int], rate: float | None) -> FetchSource:
    has = [chunk for chunk in CHUNKS if chunk.index in chunks]
    return FetchSource(Unread(f"peer:{name}"), has, 2, spare=True, patience_s=1.0, bytes_per_s=rate)


@pytest.mark.slow
@settings(max_examples=50)
@given(
    peers=PEERS,
    late_peer=st.tuples(CHUNK_SETS, st.none() | st.just(1e6)),
    pulls=PULLS,
    again=PULLS,
    wanted=CHUNK_SETS,
    data=st.data(),
)
def test_everything_wanted_comes_once(
    peers: list[tuple[set[int], float | None]],
    late_peer: tuple[set[int], float | None],
    pulls: list[tuple[int, list[int]]],
    again: list[tuple[int, list[int]]],
    wanted: set[int],
    data: st.DataObject,
) -> None:
    clock = Clock()
    sources = [peer(str(number), *one) for number, one in enumerate(peers)]
    sources.append(FetchSource(Unread("store"), CHUNKS, 2, costly=True))
    plan = PullPlan((index % len(sources), chunks) for index, chunks in pulls)
    progress = FetchProgress(sources, COUNT, plan=plan, clock=clock)
    progress.want(sorted(wanted))
    under_way: list[ChunkRun] = []
    came: Counter[int] = Counter()
    for step in range(400):
        if step == 5:
            sources.append(peer("late", *late_peer))
            progress.add_source(sources[-1])
            progress.replan(PullPlan((index % len(sources), chunks) for index, chunks in again))
        for index in range(len(sources)):
            while progress.begin_thread(index):
                run = progress.next_run(index)
                assert run is not None, "a thread that begins has something to do"
                under_way.append(run)
        taken = [chunk.index for run in under_way for chunk in run.chunks]
        assert len(taken) == len(set(taken)), "a chunk is one thread's at a time"
        if not under_way:
            break
        clock.now_s += 0.1
        run = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)) if step < 200 else 0)
        resolve(progress, sources, run, data.draw(OUTCOMES) if step < 200 else "ready", clock, came)
    assert progress.is_filled, "nothing is left lying"
    assert set(came) >= wanted
    assert set(came.values()) <= {1}
    assert progress.running == 0


def resolve(
    progress: FetchProgress,
    sources: list[FetchSource],
    run: ChunkRun,
    outcome: str,
    clock: Clock,
    came: Counter[int],
) -> None:
    """What a thread does with its run, as the fetcher does it. The store never fails for good."""
    (chunk,) = run.chunks
    if outcome == "late":
        clock.now_s += 5.0
        progress.gives_up(run)
    if outcome == "ready":
        progress.ready(chunk)
        came[chunk.index] += 1
    elif outcome in ("lose", "late") or not sources[run.source_index].spare:
        progress.put_back(run.chunks)
    else:
        progress.strike(run.source_index, corrupt=outcome == "corrupt", lost=outcome == "lost")
        assert isinstance(progress.failed(run.source_index, chunk, (0.0,)), Retry)
        progress.put_back([chunk])
    progress.finish_run(run)
    progress.end_thread(run.source_index)


def test_a_slow_source_leaves_the_front_and_helps_at_the_end() -> None:
    everything = set(range(COUNT))
    quick, slow = peer("quick", everything, 1e6), peer("slow", everything, 2.1e5)
    progress = FetchProgress([quick, slow], COUNT, clock=Clock())
    progress.want(range(COUNT))
    assert progress.begin_thread(1)
    run = progress.next_run(1)
    assert run is not None
    assert [chunk.index for chunk in run.chunks] == [4], "the quick one has finished four when this one has come"
    assert progress.begin_thread(0)
    first = progress.next_run(0)
    assert first is not None
    assert first.chunks[0].index == 0


def test_the_store_takes_over_from_a_peer_from_which_nothing_comes() -> None:
    clock = Clock()
    progress = FetchProgress(
        [peer("hung", {0}, None), FetchSource(Unread("store"), CHUNKS, 2, costly=True)], COUNT, clock=clock
    )
    progress.want([0])
    assert not progress.begin_thread(1)
    assert progress.begin_thread(0)
    run = progress.next_run(0)
    assert run is not None
    assert not progress.gives_up(run)
    clock.now_s = 1.1 * FIRST_FACTOR
    assert progress.gives_up(run)
    assert not progress.begin_thread(1), "not before the peer's thread has really stopped"
    progress.put_back(run.chunks)
    assert progress.begin_thread(1)
    taken = progress.next_run(1)
    assert taken is not None
    assert taken.chunks == run.chunks


def test_the_order_of_a_plan_stays_when_its_source_is_told_again_what_it_has() -> None:
    """Each change of a worker's order tells it; all chunks were then taken at once, by their numbers."""
    reading = peer("reading", {0, 1, 2, 3}, None)
    progress = FetchProgress([reading], COUNT, plan=PullPlan([(0, [3]), (0, [2]), (0, [1]), (0, [0])]), clock=Clock())
    progress.want(range(4))
    progress.extend_source(0, reading.chunks)
    came = []
    while progress.begin_thread(0) and (run := progress.next_run(0)) is not None:
        came += [chunk.index for chunk in run.chunks]
        progress.ready(run.chunks[0])
        progress.finish_run(run)
        progress.end_thread(0)
    assert came == [3, 2, 1, 0]


def test_what_a_plan_has_from_a_peer_is_waited_for_longer() -> None:
    clock = Clock()
    sources = [peer("waiting", {0}, None), FetchSource(Unread("store"), CHUNKS, 2, costly=True)]
    progress = FetchProgress(sources, COUNT, plan=PullPlan([(0, [0])]), clock=clock)
    progress.want([0])
    assert progress.begin_thread(0)
    run = progress.next_run(0)
    assert run is not None
    clock.now_s = PLANNED_PATIENCE_S - 1
    assert not progress.begin_thread(1), "the store takes nothing from a plan"
    assert not progress.gives_up(run)
    clock.now_s = PLANNED_PATIENCE_S + 1
    assert progress.gives_up(run)


def test_a_plan_s_source_that_has_a_pace_and_stalls_is_replaced_as_soon_as_any_other() -> None:
    clock = Clock()
    progress = FetchProgress(
        [peer("stalls", {0, 1}, None), peer("idle", {0, 1}, 1e9)], COUNT, plan=PullPlan([(0, [0, 1])]), clock=clock
    )
    progress.want([0, 1])
    assert progress.begin_thread(0)
    run = progress.next_run(0)
    assert run is not None
    progress.ready(run.chunks[0])
    progress.finish_run(run)
    run = progress.next_run(0)
    assert run is not None
    clock.now_s += 0.9
    assert not progress.gives_up(run)
    clock.now_s += 20
    assert progress.gives_up(run)
    progress.put_back(run.chunks)
    assert progress.begin_thread(1)
