"""Segments and their fetches, from a folder and from a real S3 server: right bytes, or a failure that wakes all."""

from __future__ import annotations

import asyncio
import os

import pytest

from fleetstart import native
from fleetstart.prefetcher.segments.store import SegmentStore
from fleetstart.prefetcher.sources.base import Source
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.ids import WorkerId
from tests.prefetcher.nodes import CHUNK_BYTES, Store
from tests.prefetcher.segment_cases import ONE, SLAB_BYTES, TWO, CountingSource, content, reading, run

# ── the right bytes ────────────────────────────────────────────────────────────────────────────────


def test_every_byte_of_every_part_arrives_where_the_manifest_says(source: Source, store: Store) -> None:
    first, second = os.urandom(3 * CHUNK_BYTES + 17), os.urandom(5 * CHUNK_BYTES)
    checkpoint = store.put_checkpoint(first, second)

    async def scenario(segments: SegmentStore) -> None:
        segment = await segments.acquire(checkpoint, ONE)
        await segment.filled.wait()

        assert segment.error is None
        assert content(segment, 0, len(first)) == first
        assert content(segment, 4 * CHUNK_BYTES, len(second)) == second
        assert segment.control is not None
        assert segment.control.state == "ready"
        assert segment.report().ready_bytes == len(first) + len(second)
        assert segments.is_ready(checkpoint)

    run(source, scenario)


def test_a_worker_sees_the_same_bytes_through_the_descriptors(source: Source, store: Store) -> None:
    data = os.urandom(2 * CHUNK_BYTES)
    checkpoint = store.put_checkpoint(data)

    async def scenario(segments: SegmentStore) -> None:
        segment = await segments.acquire(checkpoint, ONE)
        control_fd, *slab_fds = segment.descriptors()
        control = native.ControlBlock.attach(os.dup(control_fd))
        region = native.Region.attach([os.dup(fd) for fd in slab_fds], 2 * CHUNK_BYTES)
        control.wait(0, 1, 10.0)
        assert bytes(region.view(0, len(data))) == data

    run(source, scenario)


def test_ten_workers_share_one_fetch(store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(20 * CHUNK_BYTES))
    source = CountingSource(store.folder)

    async def scenario(segments: SegmentStore) -> None:
        found = await asyncio.gather(*(segments.acquire(checkpoint, WorkerId(f"w-{n}")) for n in range(10)))
        await found[0].filled.wait()
        assert len({id(segment) for segment in found}) == 1
        await segments.acquire(checkpoint, WorkerId("later"))

    run(source, scenario)

    assert len(source.reads) == 20
    assert set(source.reads.values()) == {1}
    assert set(source.objects.values()) == {1}


def test_workers_attach_while_it_fills(store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(4 * CHUNK_BYTES))
    source = CountingSource(store.folder)
    source.gate.clear()

    async def scenario(segments: SegmentStore) -> None:
        segment = await segments.acquire(checkpoint, ONE)
        assert segment.state == "filling"
        assert segments.reports()[0].ready_bytes == 0
        source.gate.set()
        await segment.filled.wait()
        assert segments.is_ready(checkpoint)

    run(source, scenario)


# ── memory ─────────────────────────────────────────────────────────────────────────────────────────


def test_what_cannot_fit_is_refused_with_the_figures(store: Store) -> None:
    checkpoint = store.put_checkpoint(bytes(2 * SLAB_BYTES))

    async def scenario(segments: SegmentStore) -> None:
        with pytest.raises(Unavailable) as caught:
            await segments.acquire(checkpoint, ONE)
        for figure in (2 * SLAB_BYTES, 3 * SLAB_BYTES, SLAB_BYTES + 1):
            assert f"{figure:,}" in caught.value.message
        assert segments.budget.used_bytes == segments.budget.memory.used_bytes == 0

    run(FolderSource(store.folder), scenario, memory_bytes=3 * SLAB_BYTES, workers_bytes=SLAB_BYTES + 1)


def test_what_the_pool_can_never_hold_is_refused_though_nobody_uses_it(store: Store) -> None:
    checkpoint = store.put_checkpoint(bytes(SLAB_BYTES + 1))

    async def scenario(segments: SegmentStore) -> None:
        with pytest.raises(Unavailable, match=f"{2 * SLAB_BYTES:,} bytes of memory for weights"):
            await segments.acquire(checkpoint, ONE)

    run(FolderSource(store.folder), scenario, memory_bytes=SLAB_BYTES)


def test_an_unused_segment_gives_way_and_a_used_one_does_not(store: Store) -> None:
    first = store.put_checkpoint(os.urandom(SLAB_BYTES + CHUNK_BYTES))
    data = os.urandom(SLAB_BYTES + 2 * CHUNK_BYTES)
    second = store.put_checkpoint(data)

    async def scenario(segments: SegmentStore) -> None:
        held = await segments.acquire(first, ONE)
        await held.filled.wait()
        with pytest.raises(Unavailable):
            await segments.acquire(second, TWO)
        segments.release(held, ONE)
        assert segments.is_ready(first), "warm until room is needed"

        other = await segments.acquire(second, TWO)
        await other.filled.wait()
        assert not segments.is_ready(first)
        assert segments.budget.evictions == 1
        assert segments.budget.used_bytes == segments.budget.memory.used_bytes == 2 * SLAB_BYTES
        assert reading(other, len(data)) == data
        assert reading(other, 2 * SLAB_BYTES - CHUNK_BYTES)[len(data) :].count(0) == SLAB_BYTES - 3 * CHUNK_BYTES

    run(FolderSource(store.folder), scenario, memory_bytes=3 * SLAB_BYTES)


def test_a_waiter_that_gives_up_leaves_no_pin(store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(CHUNK_BYTES))

    async def scenario(segments: SegmentStore) -> None:
        waiting = asyncio.create_task(segments.acquire(checkpoint, ONE))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        segment = await segments.acquire(checkpoint, TWO)
        assert segment.pins == {TWO}
        await segment.filled.wait()

    run(FolderSource(store.folder), scenario)


def test_where_idle_weights_are_not_kept_they_go_with_their_last_worker(store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(4 * CHUNK_BYTES))

    async def scenario(segments: SegmentStore) -> None:
        first = await segments.acquire(checkpoint, ONE)
        assert await segments.acquire(checkpoint, TWO) is first
        await first.filled.wait()
        segments.release(first, ONE)
        assert segments.is_ready(checkpoint)
        segments.release(first, TWO)
        assert not segments.is_ready(checkpoint)
        assert segments.budget.used_bytes == 0
        again = await segments.acquire(checkpoint, ONE)
        assert again is not first
        await again.filled.wait()
        assert again.error is None

    run(FolderSource(store.folder), scenario, keep_idle=False)
