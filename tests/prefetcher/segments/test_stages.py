"""Segments of pipeline stages: which chunks are fetched, for one worker and for several."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.prefetcher.segments.store import SegmentStore
from fleetstart.runtime.contract.ids import WorkerId
from tests.prefetcher.nodes import CHUNK_BYTES, Store
from tests.prefetcher.stages import LAYERS, ONE, THREE, TWO, Gated, Model, filled, right, run, state, there


def test_a_stage_gets_its_chunks_and_no_others(model: Model, gated: Gated) -> None:
    gated.gate.clear()

    async def scenario(segments: SegmentStore) -> None:
        segment = await segments.acquire(model.checkpoint, ONE, (2, 4))
        assert state(segment) == "filling"
        gated.gate.set()
        await segment.filled.wait()

        assert segment.error is None
        assert state(segment) == "partial"
        assert there(segment.report()) == model.chunks(2, 4)
        assert segment.report().ready_bytes == len(model.chunks(2, 4)) * CHUNK_BYTES
        assert segments.is_ready(model.checkpoint, (2, 4))
        assert segments.is_ready(model.checkpoint, (2, 3))
        assert not segments.is_ready(model.checkpoint, (1, 4))
        assert not segments.is_ready(model.checkpoint)
        assert segment.fetch_span_ns[1] > segment.fetch_span_ns[0]
        assert right(segment, model, model.chunks(2, 4))

    run(gated, scenario)

    assert sorted(gated.given) == sorted(model.chunks(2, 4))
    assert not gated.paced


def test_two_stages_of_one_checkpoint_share_a_segment_that_has_what_either_needs(model: Model, gated: Gated) -> None:
    gated.gate.clear()

    async def scenario(segments: SegmentStore) -> None:
        one = await segments.acquire(model.checkpoint, ONE, (0, 2))
        two = await segments.acquire(model.checkpoint, TWO, (4, 6))
        assert one is two
        assert one.state == "filling"
        gated.gate.set()
        await one.filled.wait()
        assert there(one.report()) == model.chunks(0, 2) | model.chunks(4, 6)
        assert one.pins == {ONE, TWO}

        segments.release(one, ONE)
        again = await segments.acquire(model.checkpoint, THREE, (5, 6))
        assert again.filled.is_set(), "it was there"

    run(gated, scenario)

    assert len(gated.given) == len(set(gated.given))


def test_a_whole_worker_has_the_rest_fetched_and_waits_for_it(model: Model, gated: Gated) -> None:
    async def scenario(segments: SegmentStore) -> None:
        segment = await filled(segments, model, ONE, (2, 4))
        span = segment.fetch_span_ns
        gated.gate.clear()

        assert await segments.acquire(model.checkpoint, TWO) is segment
        assert state(segment) == "filling"
        assert segment.fetch_span_ns[0] >= span[1]
        assert segment.fetch_span_ns[1] == 0
        gated.gate.set()
        await segment.filled.wait()
        assert state(segment) == "ready"
        assert segments.is_ready(model.checkpoint)
        assert segments.reports()[0].ranges == [(0, len(model.everything))]
        assert right(segment, model, model.everything)

    run(gated, scenario)

    assert sorted(gated.given) == sorted(model.everything)
    assert not gated.paced


def test_a_stage_s_adapter_comes_whole(store: Store, gated: Gated, model: Model) -> None:
    adapter = Model(store, layers=2)

    async def scenario(segments: SegmentStore) -> None:
        weights, other = await segments.acquire_all([model.checkpoint, adapter.checkpoint], ONE, (0, 1))
        await asyncio.gather(weights.filled.wait(), other.filled.wait())
        assert (weights.state, other.state) == ("partial", "ready")

    run(gated, scenario)


LAYERS_OF_STAGE = st.tuples(st.integers(0, LAYERS - 1), st.integers(1, LAYERS)).filter(lambda cut: cut[0] < cut[1])


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(asked=st.lists(st.one_of(st.none(), LAYERS_OF_STAGE), min_size=1, max_size=4), grows=st.booleans())
def test_whoever_asks_for_what_everyone_has_it_and_each_chunk_comes_once(
    tmp_path_factory: pytest.TempPathFactory, asked: list[tuple[int, int] | None], grows: bool
) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    model, gated = Model(store), Gated(store.folder)

    async def scenario(segments: SegmentStore) -> None:
        workers = [WorkerId(f"w-{number}") for number in range(len(asked))]
        held = await asyncio.gather(
            *(segments.acquire(model.checkpoint, worker, stage) for worker, stage in zip(workers, asked, strict=True))
        )
        segment = held[0]
        growth = asyncio.ensure_future(segments.grow(segment)) if grows else None
        await segment.filled.wait()
        for stage in asked:
            assert segments.is_ready(model.checkpoint, stage)
        if growth is not None:
            await growth
        needed = set().union(*(set(segment.needed(stage)) for stage in asked))
        assert there(segment.report()) == (model.everything if grows else needed)
        assert right(segment, model, there(segment.report()))
        for worker in workers:
            segments.release(segment, worker)

    run(gated, scenario)
    assert len(gated.given) == len(set(gated.given))
