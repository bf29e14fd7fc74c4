"""Segments and their fetches, from a folder and from a real S3 server: right bytes, or a failure that wakes all."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetstart import native
from fleetstart.prefetcher.memory import slab_size
from fleetstart.prefetcher.segments import Segment, Segments
from fleetstart.prefetcher.sources import Abandoned, FileSource, Range, Source, SourceError
from fleetstart.runtime.contract.errors import (
    CheckpointInvalid,
    ChecksumMismatch,
    FleetError,
    StoreFailed,
    Unavailable,
    WeightsMissing,
)
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from tests.prefetcher.nodes import CHUNK_BYTES, S3Server, Store
from tests.servers import wait_until

ONE, TWO = WorkerId("w-1"), WorkerId("w-2")
SLAB_BYTES = slab_size(1 << 30)
Scenario = Callable[[Segments], Coroutine[Any, Any, None]]


def run(
    source: Source, scenario: Scenario, *, memory_bytes: int = 1 << 30, workers_bytes: int = 0, keep_idle: bool = True
) -> None:
    async def main() -> None:
        segments = Segments(
            source=source,
            memory_bytes=memory_bytes,
            workers_bytes=lambda: workers_bytes,
            threads=4,
            keep_idle=keep_idle,
        )
        try:
            async with asyncio.timeout(60):
                await scenario(segments)
        finally:
            await segments.close()

    asyncio.run(main())


def content(segment: Segment, offset: int, size_bytes: int) -> bytes:
    assert segment.region is not None
    return bytes(segment.region.view(offset, size_bytes))


def reading(segment: Segment, size_bytes: int) -> bytes:
    """What a worker sees."""
    return bytes(native.Region.attach([os.dup(fd) for fd in segment.descriptors()[1:]], size_bytes).view(0, size_bytes))


async def failure_of(segments: Segments, checkpoint: CheckpointId) -> FleetError:
    segment = await segments.acquire(checkpoint, ONE)
    await segment.filled.wait()
    assert segment.error is not None
    assert segment.control is not None
    with pytest.raises(native.SegmentFailed) as caught:
        segment.control.wait(0, segment.control.chunk_count - 1, 1.0)
    assert caught.value.args == (segment.error.code, segment.error.message)
    return segment.error


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def part_path(store: Store, checkpoint: CheckpointId, number: int = 0) -> Path:
    return store.path(f"checkpoints/{checkpoint}/part-{number:05}.safetensors")


# ── the right bytes ────────────────────────────────────────────────────────────────────────────────


def test_every_byte_of_every_part_arrives_where_the_manifest_says(source: Source, store: Store) -> None:
    first, second = os.urandom(3 * CHUNK_BYTES + 17), os.urandom(5 * CHUNK_BYTES)
    checkpoint = store.put_checkpoint(first, second)

    async def scenario(segments: Segments) -> None:
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

    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(checkpoint, ONE)
        control_fd, *slab_fds = segment.descriptors()
        control = native.ControlBlock.attach(os.dup(control_fd))
        region = native.Region.attach([os.dup(fd) for fd in slab_fds], 2 * CHUNK_BYTES)
        control.wait(0, 1, 10.0)
        assert bytes(region.view(0, len(data))) == data

    run(source, scenario)


class CountingSource(FileSource):
    """Counts chunks, which it gives one by one; can hold them up at a gate."""

    run_bytes = 1

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: Counter[tuple[str, int]] = Counter()
        self.objects: Counter[str] = Counter()
        self.gate = threading.Event()
        self.gate.set()

    def read_object(self, key: str, limit_bytes: int) -> bytes:
        self.objects[key] += 1
        return super().read_object(key, limit_bytes)

    def read(self, asked: Range, stopped: Callable[[], bool]) -> Iterator[int]:
        while not self.gate.wait(0.01):
            if stopped():
                raise Abandoned(asked.key)
        self.reads[asked.key, asked.offset] += 1
        yield from super().read(asked, stopped)


def test_ten_workers_share_one_fetch(store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(20 * CHUNK_BYTES))
    source = CountingSource(store.folder)

    async def scenario(segments: Segments) -> None:
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

    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(checkpoint, ONE)
        assert segment.state == "filling"
        assert segments.reports()[0].ready_bytes == 0
        source.gate.set()
        await segment.filled.wait()
        assert segments.is_ready(checkpoint)

    run(source, scenario)


# ── what goes wrong ────────────────────────────────────────────────────────────────────────────────


def test_a_flipped_byte_is_found_and_its_place_named(source: Source, store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(5 * CHUNK_BYTES))
    flip(part_path(store, checkpoint), -CHUNK_BYTES - 5)

    async def scenario(segments: Segments) -> None:
        error = await failure_of(segments, checkpoint)
        assert isinstance(error, ChecksumMismatch)
        assert f"chunk 3 of {checkpoint[:12]} (part-00000.safetensors bytes" in error.message
        assert "expected" in error.message

    run(source, scenario)


def test_a_byte_that_flips_on_the_way_is_read_again(store: Store) -> None:
    data = os.urandom(3 * CHUNK_BYTES)
    checkpoint = store.put_checkpoint(data)

    class Noisy(CountingSource):
        def read(self, asked: Range, stopped: Callable[[], bool]) -> Iterator[int]:
            for checksum, piece in zip(super().read(asked, stopped), asked.pieces, strict=True):
                if self.reads[asked.key, asked.offset] > 1:
                    yield checksum
                else:
                    piece.into[0] ^= 1
                    yield native.xxh3(piece.into)

    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(checkpoint, ONE)
        await segment.filled.wait()
        assert segment.error is None
        assert content(segment, 0, len(data)) == data

    run(Noisy(store.folder), scenario)


def test_a_truncated_object_is_refused_with_both_lengths(source: Source, store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(5 * CHUNK_BYTES))
    path = part_path(store, checkpoint)
    size = path.stat().st_size
    os.truncate(path, size - 100)

    async def scenario(segments: Segments) -> None:
        error = await failure_of(segments, checkpoint)
        assert isinstance(error, CheckpointInvalid)
        assert f"{size:,} bytes expected, {size - 100:,} found" in error.message
        assert "part-00000.safetensors" in error.message

    run(source, scenario)


def test_a_missing_part_is_named(source: Source, store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(CHUNK_BYTES), os.urandom(CHUNK_BYTES))
    part_path(store, checkpoint, 1).unlink()

    async def scenario(segments: Segments) -> None:
        error = await failure_of(segments, checkpoint)
        assert isinstance(error, CheckpointInvalid)
        assert "part-00001.safetensors" in error.message

    run(source, scenario)


def test_a_missing_checkpoint_and_a_forged_id_are_refused(source: Source) -> None:
    async def scenario(segments: Segments) -> None:
        with pytest.raises(WeightsMissing, match=r"manifest\.json"):
            await segments.acquire(CheckpointId("0" * 64), ONE)
        with pytest.raises(WeightsMissing, match="not the id"):
            await segments.acquire(CheckpointId("../../etc"), ONE)
        assert segments.reports() == []

    run(source, scenario)


def test_a_manifest_that_is_not_the_published_one_is_refused(source: Source, store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(CHUNK_BYTES))
    flip(store.path(f"checkpoints/{checkpoint}/manifest.json"), 30)

    async def scenario(segments: Segments) -> None:
        with pytest.raises(CheckpointInvalid, match="digest"):
            await segments.acquire(checkpoint, ONE)

    run(source, scenario)


def test_after_a_failure_the_next_start_tries_again(source: Source, store: Store) -> None:
    data = os.urandom(3 * CHUNK_BYTES)
    checkpoint = store.put_checkpoint(data)
    path = part_path(store, checkpoint)
    good = path.read_bytes()
    flip(path, -1)

    async def scenario(segments: Segments) -> None:
        await failure_of(segments, checkpoint)
        assert segments.room.used_bytes == SLAB_BYTES, "who failed to start may still have it mapped"
        path.write_bytes(good)
        segment = await segments.acquire(checkpoint, TWO)
        await segment.filled.wait()
        assert segment.error is None
        assert content(segment, 0, len(data)) == data

    run(source, scenario)


def test_memory_of_a_failed_segment_is_free_once_its_workers_are_gone(store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(3 * CHUNK_BYTES))
    flip(part_path(store, checkpoint), -1)

    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(checkpoint, ONE)
        await segment.filled.wait()
        segments.release(segment, ONE)
        assert segments.room.used_bytes == 0

    run(FileSource(store.folder), scenario)


def test_a_store_that_dies_midway_fails_the_segment_and_wakes_its_waiters(
    store: Store, s3_server: S3Server, aws: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    from fleetstart.prefetcher.s3 import S3Source

    checkpoint = store.put_checkpoint(os.urandom(64 * CHUNK_BYTES))

    class DiesMidway(S3Source):
        reads = 0

        def read(self, asked: Range, stopped: Callable[[], bool]) -> Iterator[int]:
            self.reads += 1
            if self.reads == 10:
                s3_server.kill()
            return super().read(asked, stopped)

    async def scenario(segments: Segments) -> None:
        error = await failure_of(segments, checkpoint)
        assert isinstance(error, StoreFailed)
        assert "4 times" in error.message

    run(DiesMidway(bucket="weights"), scenario)


def test_a_store_that_stumbles_is_asked_again(store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(8 * CHUNK_BYTES))

    class Stumbling(CountingSource):
        def read(self, asked: Range, stopped: Callable[[], bool]) -> Iterator[int]:
            for checksum in super().read(asked, stopped):
                if asked.offset % 3 == 0 and self.reads[asked.key, asked.offset] == 1:
                    raise SourceError("stumbled")
                yield checksum

    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(checkpoint, ONE)
        await segment.filled.wait()
        assert segment.error is None

    run(Stumbling(store.folder), scenario)


def test_closing_stops_the_threads_and_wakes_the_waiters(store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(8 * CHUNK_BYTES))
    source = CountingSource(store.folder)
    source.gate.clear()
    held: list[Segment] = []

    async def scenario(segments: Segments) -> None:
        held.append(await segments.acquire(checkpoint, ONE))

    run(source, scenario)

    control = held[0].control
    assert control is not None
    with pytest.raises(native.SegmentFailed, match="abandoned"):
        control.wait(0, 0, 5.0)
    wait_until(lambda: not any(thread.name.startswith("store-") for thread in threading.enumerate()))


# ── memory ─────────────────────────────────────────────────────────────────────────────────────────


def test_what_cannot_fit_is_refused_with_the_figures(store: Store) -> None:
    checkpoint = store.put_checkpoint(bytes(2 * SLAB_BYTES))

    async def scenario(segments: Segments) -> None:
        with pytest.raises(Unavailable) as caught:
            await segments.acquire(checkpoint, ONE)
        for figure in (2 * SLAB_BYTES, 3 * SLAB_BYTES, SLAB_BYTES + 1):
            assert f"{figure:,}" in caught.value.message
        assert segments.room.used_bytes == segments.room.memory.used_bytes == 0

    run(FileSource(store.folder), scenario, memory_bytes=3 * SLAB_BYTES, workers_bytes=SLAB_BYTES + 1)


def test_what_the_pool_can_never_hold_is_refused_though_nobody_uses_it(store: Store) -> None:
    checkpoint = store.put_checkpoint(bytes(SLAB_BYTES + 1))

    async def scenario(segments: Segments) -> None:
        with pytest.raises(Unavailable, match=f"{2 * SLAB_BYTES:,} bytes of memory for weights"):
            await segments.acquire(checkpoint, ONE)

    run(FileSource(store.folder), scenario, memory_bytes=SLAB_BYTES)


def test_an_unused_segment_gives_way_and_a_used_one_does_not(store: Store) -> None:
    first = store.put_checkpoint(os.urandom(SLAB_BYTES + CHUNK_BYTES))
    data = os.urandom(SLAB_BYTES + 2 * CHUNK_BYTES)
    second = store.put_checkpoint(data)

    async def scenario(segments: Segments) -> None:
        held = await segments.acquire(first, ONE)
        await held.filled.wait()
        with pytest.raises(Unavailable):
            await segments.acquire(second, TWO)
        segments.release(held, ONE)
        assert segments.is_ready(first), "warm until room is needed"

        other = await segments.acquire(second, TWO)
        await other.filled.wait()
        assert not segments.is_ready(first)
        assert segments.room.evictions == 1
        assert segments.room.used_bytes == segments.room.memory.used_bytes == 2 * SLAB_BYTES
        assert reading(other, len(data)) == data
        assert reading(other, 2 * SLAB_BYTES - CHUNK_BYTES)[len(data) :].count(0) == SLAB_BYTES - 3 * CHUNK_BYTES

    run(FileSource(store.folder), scenario, memory_bytes=3 * SLAB_BYTES)


def test_a_waiter_that_gives_up_leaves_no_pin(store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(CHUNK_BYTES))

    async def scenario(segments: Segments) -> None:
        waiting = asyncio.create_task(segments.acquire(checkpoint, ONE))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        segment = await segments.acquire(checkpoint, TWO)
        assert segment.pins == {TWO}
        await segment.filled.wait()

    run(FileSource(store.folder), scenario)


def test_where_idle_weights_are_not_kept_they_go_with_their_last_worker(store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(4 * CHUNK_BYTES))

    async def scenario(segments: Segments) -> None:
        first = await segments.acquire(checkpoint, ONE)
        assert await segments.acquire(checkpoint, TWO) is first
        await first.filled.wait()
        segments.release(first, ONE)
        assert segments.is_ready(checkpoint)
        segments.release(first, TWO)
        assert not segments.is_ready(checkpoint)
        assert segments.room.used_bytes == 0
        again = await segments.acquire(checkpoint, ONE)
        assert again is not first
        await again.filled.wait()
        assert again.error is None

    run(FileSource(store.folder), scenario, keep_idle=False)
