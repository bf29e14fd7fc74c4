"""Failures of segments that hold a stage or grow: who gets the error, and who keeps its chunks."""

from __future__ import annotations

import pytest

from fleetstart import native
from fleetstart.prefetcher.segments.store import SegmentStore
from fleetstart.runtime.contract.errors import FleetError, StoreFailed, Unavailable
from tests.prefetcher.nodes import Store
from tests.prefetcher.stages import (
    ONE,
    SLAB_BYTES,
    TWO,
    Gated,
    Model,
    filled,
    growing,
    reading,
    right,
    run,
    state,
    until,
)


def test_a_store_that_dies_behind_the_workers_back_ends_the_growth_and_nothing_else(model: Model, gated: Gated) -> None:
    async def scenario(segments: SegmentStore) -> None:
        segment = await filled(segments, model, ONE, (2, 4))
        gated.broken = True

        with pytest.raises(StoreFailed, match="4 times"):
            await segments.grow(segment)

        assert segment.error is None
        assert state(segment) == "partial"
        assert segment.control is not None
        assert segment.control.state == "filling"
        assert right(segment, model, model.chunks(2, 4))
        with pytest.raises(StoreFailed):
            await segments.grow(segment)
        gated.broken = False
        await segments.grow(segment)
        assert state(segment) == "ready"
        assert right(segment, model, model.everything)

    run(gated, scenario)


def test_what_somebody_waits_for_and_cannot_have_fails_the_segment_and_the_growth(model: Model, gated: Gated) -> None:
    async def scenario(segments: SegmentStore) -> None:
        segment = await filled(segments, model, ONE, (2, 4))
        growth = await growing(segments, segment, gated)
        gated.broken = True
        segments.prioritize(segment, 0, len(model.everything))
        gated.gate.set()

        with pytest.raises(StoreFailed):
            await growth
        await segment.filled.wait()
        assert isinstance(segment.error, StoreFailed)
        assert segment.control is not None
        with pytest.raises(native.SegmentFailed):
            segment.control.wait(0, 0, 5.0)
        assert all(segment.control.is_ready(chunk) for chunk in model.chunks(2, 4)), "who has it, keeps it"
        with pytest.raises(StoreFailed):
            await segments.grow(segment)

        gated.broken = False
        fresh = await filled(segments, model, TWO, (2, 4))
        assert fresh is not segment
        assert fresh.error is None
        segments.release(segment, ONE)

    run(gated, scenario)


def test_a_second_stage_that_cannot_come_leaves_the_first_what_it_has(model: Model, gated: Gated) -> None:
    async def scenario(segments: SegmentStore) -> None:
        segment = await filled(segments, model, ONE, (0, 2))
        gated.broken = True
        await segments.acquire(model.checkpoint, TWO, (4, 5))
        await segment.filled.wait()
        assert state(segment) == "failed"
        assert right(segment, model, model.chunks(0, 2))

    run(gated, scenario)


def test_a_damaged_chunk_that_nobody_wants_harms_nobody(model: Model, gated: Gated) -> None:
    data = bytearray(model.path.read_bytes())
    data[-1] ^= 1
    model.path.write_bytes(data)

    async def scenario(segments: SegmentStore) -> None:
        segment = await filled(segments, model, ONE, (2, 4))
        assert segment.error is None
        with pytest.raises(FleetError, match="checksum"):
            await segments.grow(segment)
        assert state(segment) == "partial"

    run(gated, scenario)


def test_who_is_gone_while_it_grows_leaves_memory_that_gives_way(store: Store, model: Model, gated: Gated) -> None:
    other = Model(store)

    async def scenario(segments: SegmentStore) -> None:
        segment = await filled(segments, model, ONE, (0, 1))
        growth = await growing(segments, segment, gated)
        segments.release(segment, ONE)
        with pytest.raises(Unavailable, match="no longer in use"):
            await growth
        gated.gate.set()
        await until(lambda: not reading(), "the threads' end")

        assert state(segment) == "partial"
        await filled(segments, other, TWO)
        assert segments.budget.evictions == 1
        assert segments.budget.used_bytes == segments.budget.memory.used_bytes == SLAB_BYTES

    run(gated, scenario, memory_bytes=SLAB_BYTES)


def test_closing_ends_a_growth(model: Model, gated: Gated) -> None:
    async def scenario(segments: SegmentStore) -> None:
        segment = await filled(segments, model, ONE, (0, 1))
        growth = await growing(segments, segment, gated)
        await segments.close()
        with pytest.raises(Unavailable, match="cancelled"):
            await growth

    run(gated, scenario)
