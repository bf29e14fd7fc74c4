"""Memory and disk of segments that hold a stage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleetstart import native
from fleetstart.prefetcher.segments.disk_cache import DiskCache
from fleetstart.prefetcher.segments.store import SegmentStore
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.weights.manifest import read_manifest
from tests.prefetcher.nodes import CHUNK_BYTES, Store
from tests.prefetcher.stages import ONE, SLAB_BYTES, TWO, Gated, Model, filled, right, run, state, there, until


@pytest.fixture
def large(store: Store) -> Model:
    """A model of about one slab a layer."""
    return Model(store, layers=3, layer_chunks=SLAB_BYTES // CHUNK_BYTES)


def test_a_stage_takes_memory_for_its_own_chunks_alone(large: Model, store: Store) -> None:
    async def scenario(segments: SegmentStore) -> None:
        segment = await filled(segments, large, ONE, (2, 3))
        budget = segments.budget
        assert budget.used_bytes == budget.memory.used_bytes == 2 * SLAB_BYTES, "a layer lies across two slabs"
        assert segment.report().size_bytes == len(large.data)
        assert len(segment.descriptors()) == 1 + 4
        assert right(segment, large, large.chunks(2, 3))

    run(FolderSource(store.folder), scenario, memory_bytes=2 * SLAB_BYTES)


def test_what_cannot_grow_for_lack_of_memory_says_so_and_goes_on_as_it_is(large: Model, store: Store) -> None:
    async def scenario(segments: SegmentStore) -> None:
        segment = await filled(segments, large, ONE, (2, 3))
        for attempt in (segments.grow(segment), segments.acquire(large.checkpoint, TWO)):
            with pytest.raises(Unavailable) as caught:
                await attempt
            assert f"{2 * SLAB_BYTES:,} bytes; of the node's {3 * SLAB_BYTES:,}" in caught.value.message
        assert segments.budget.used_bytes == 2 * SLAB_BYTES
        assert state(segment) == "partial"
        assert segment.pins == {ONE}

        segments.prioritize(segment, 0, 0)
        await segment.filled.wait()
        assert there(segment.report()) == large.chunks(2, 3) | {0}
        segments.prioritize(segment, 0, len(large.everything))
        await until(lambda: segment.state == "failed", "the segment's failure")
        assert isinstance(segment.error, Unavailable), "who waits for it is told"
        assert right(segment, large, large.chunks(2, 3))

    run(FolderSource(store.folder), scenario, memory_bytes=3 * SLAB_BYTES)


def test_a_worker_that_asks_for_more_than_there_is_memory_for_fails_no_other(large: Model, store: Store) -> None:
    async def scenario(segments: SegmentStore) -> None:
        segment = await filled(segments, large, ONE, (2, 3))
        await segments.acquire(large.checkpoint, TWO, (2, 3))
        with pytest.raises(Unavailable):
            segments.prioritize(segment, 0, len(large.everything))
        assert segment.error is None
        assert right(segment, large, large.chunks(2, 3))

    run(FolderSource(store.folder), scenario, memory_bytes=3 * SLAB_BYTES)


def test_growth_makes_room_and_its_bytes_appear_where_workers_attached(store: Store, large: Model) -> None:
    unused = Model(store, layers=2, layer_chunks=SLAB_BYTES // CHUNK_BYTES)

    async def scenario(segments: SegmentStore) -> None:
        before = await filled(segments, unused, TWO, (1, 2))
        segments.release(before, TWO)
        segment = await segments.acquire(large.checkpoint, ONE, (2, 3))
        fds = [os.dup(fd) for fd in segment.descriptors()[1:]]
        region = native.Region.attach(fds, len(large.data))
        control = native.ControlBlock.attach(os.dup(segment.descriptors()[0]))
        await segments.grow(segment)
        control.wait(0, control.chunk_count - 1, 1.0)
        assert bytes(region.view(0, len(large.data))) == large.data
        assert segments.budget.evictions == 1
        assert segments.budget.used_bytes == segments.budget.memory.used_bytes == 4 * SLAB_BYTES

    run(FolderSource(store.folder), scenario, memory_bytes=5 * SLAB_BYTES)


def test_a_stage_is_kept_on_the_disk_and_what_is_told_of_it_is_true(
    model: Model, gated: Gated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetstart.prefetcher.segments.disk_cache.RESERVE_BYTES", 0)
    stage = model.chunks(2, 4)
    expected = [(min(stage), max(stage) + 1)]

    async def first(segments: SegmentStore) -> None:
        await filled(segments, model, ONE, (2, 4))
        await until(lambda: segments.disk_ranges() == {model.checkpoint: expected}, "the chunks on the disk")

    async def second(segments: SegmentStore) -> None:
        assert segments.disk_ranges() == {model.checkpoint: expected}
        gated.given.clear()
        segment = await segments.acquire(model.checkpoint, ONE, (3, 5))
        await segments.grow(segment)
        assert right(segment, model, model.everything)
        assert set(gated.given) == model.everything - stage
        whole = [(0, len(model.everything))]
        await until(lambda: segments.disk_ranges() == {model.checkpoint: whole}, "all of it on the disk")

    run(gated, first, disk=DiskCache(tmp_path / "tier", 1 << 30))
    run(gated, second, disk=DiskCache(tmp_path / "tier", 1 << 30))
    assert read_manifest((tmp_path / "tier" / model.checkpoint / "manifest.json").read_bytes()) == model.manifest
