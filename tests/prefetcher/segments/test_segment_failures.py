"""Failures of segments: corrupt bytes are detected and named, waiters wake, and the next start tries again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from fleetstart import native
from fleetstart.prefetcher.segments.store import Segment, SegmentStore
from fleetstart.prefetcher.sources.base import ObjectRange, Source
from fleetstart.prefetcher.sources.errors import SourceError
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.runtime.contract.errors import CheckpointInvalid, ChecksumMismatch, StoreFailed, WeightsMissing
from fleetstart.runtime.contract.ids import CheckpointId
from tests.prefetcher.nodes import CHUNK_BYTES, S3Server, Store
from tests.prefetcher.segment_cases import (
    ONE,
    SLAB_BYTES,
    TWO,
    CountingSource,
    content,
    failure_of,
    flip,
    part_path,
    run,
)
from tests.servers import wait_until


def test_a_flipped_byte_is_found_and_its_place_named(source: Source, store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(5 * CHUNK_BYTES))
    flip(part_path(store, checkpoint), -CHUNK_BYTES - 5)

    async def scenario(segments: SegmentStore) -> None:
        error = await failure_of(segments, checkpoint)
        assert isinstance(error, ChecksumMismatch)
        assert f"chunk 3 of {checkpoint[:12]} (part-00000.safetensors bytes" in error.message
        assert "expected" in error.message

    run(source, scenario)


def test_a_byte_that_flips_on_the_way_is_read_again(store: Store) -> None:
    data = os.urandom(3 * CHUNK_BYTES)
    checkpoint = store.put_checkpoint(data)

    class Noisy(CountingSource):
        def read(self, asked: ObjectRange, stopped: Callable[[], bool]) -> Iterator[int]:
            for checksum, piece in zip(super().read(asked, stopped), asked.pieces, strict=True):
                if self.reads[asked.key, asked.offset] > 1:
                    yield checksum
                else:
                    piece.into[0] ^= 1
                    yield native.xxh3(piece.into)

    async def scenario(segments: SegmentStore) -> None:
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

    async def scenario(segments: SegmentStore) -> None:
        error = await failure_of(segments, checkpoint)
        assert isinstance(error, CheckpointInvalid)
        assert f"{size:,} bytes expected, {size - 100:,} found" in error.message
        assert "part-00000.safetensors" in error.message

    run(source, scenario)


def test_a_missing_part_is_named(source: Source, store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(CHUNK_BYTES), os.urandom(CHUNK_BYTES))
    part_path(store, checkpoint, 1).unlink()

    async def scenario(segments: SegmentStore) -> None:
        error = await failure_of(segments, checkpoint)
        assert isinstance(error, CheckpointInvalid)
        assert "part-00001.safetensors" in error.message

    run(source, scenario)


def test_a_missing_checkpoint_and_a_forged_id_are_refused(source: Source) -> None:
    async def scenario(segments: SegmentStore) -> None:
        with pytest.raises(WeightsMissing, match=r"manifest\.json"):
            await segments.acquire(CheckpointId("0" * 64), ONE)
        with pytest.raises(WeightsMissing, match="not the id"):
            await segments.acquire(CheckpointId("../../etc"), ONE)
        assert segments.reports() == []

    run(source, scenario)


def test_a_manifest_that_is_not_the_published_one_is_refused(source: Source, store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(CHUNK_BYTES))
    flip(store.path(f"checkpoints/{checkpoint}/manifest.json"), 30)

    async def scenario(segments: SegmentStore) -> None:
        with pytest.raises(CheckpointInvalid, match="digest"):
            await segments.acquire(checkpoint, ONE)

    run(source, scenario)


def test_after_a_failure_the_next_start_tries_again(source: Source, store: Store) -> None:
    data = os.urandom(3 * CHUNK_BYTES)
    checkpoint = store.put_checkpoint(data)
    path = part_path(store, checkpoint)
    good = path.read_bytes()
    flip(path, -1)

    async def scenario(segments: SegmentStore) -> None:
        await failure_of(segments, checkpoint)
        assert segments.budget.used_bytes == SLAB_BYTES, "who failed to start may still have it mapped"
        path.write_bytes(good)
        segment = await segments.acquire(checkpoint, TWO)
        await segment.filled.wait()
        assert segment.error is None
        assert content(segment, 0, len(data)) == data

    run(source, scenario)


def test_memory_of_a_failed_segment_is_free_once_its_workers_are_gone(store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(3 * CHUNK_BYTES))
    flip(part_path(store, checkpoint), -1)

    async def scenario(segments: SegmentStore) -> None:
        segment = await segments.acquire(checkpoint, ONE)
        await segment.filled.wait()
        segments.release(segment, ONE)
        assert segments.budget.used_bytes == 0

    run(FolderSource(store.folder), scenario)


def test_a_store_that_dies_midway_fails_the_segment_and_wakes_its_waiters(
    store: Store, s3_server: S3Server, aws: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    from fleetstart.prefetcher.sources.s3 import S3Source

    checkpoint = store.put_checkpoint(os.urandom(64 * CHUNK_BYTES))

    class DiesMidway(S3Source):
        reads = 0

        def read(self, asked: ObjectRange, stopped: Callable[[], bool]) -> Iterator[int]:
            self.reads += 1
            if self.reads == 10:
                s3_server.kill()
            return super().read(asked, stopped)

    async def scenario(segments: SegmentStore) -> None:
        error = await failure_of(segments, checkpoint)
        assert isinstance(error, StoreFailed)
        assert "4 times" in error.message

    run(DiesMidway(bucket="weights"), scenario)


def test_a_store_that_stumbles_is_asked_again(store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(8 * CHUNK_BYTES))

    class Stumbling(CountingSource):
        def read(self, asked: ObjectRange, stopped: Callable[[], bool]) -> Iterator[int]:
            for checksum in super().read(asked, stopped):
                if asked.offset % 3 == 0 and self.reads[asked.key, asked.offset] == 1:
                    raise SourceError("stumbled")
                yield checksum

    async def scenario(segments: SegmentStore) -> None:
        segment = await segments.acquire(checkpoint, ONE)
        await segment.filled.wait()
        assert segment.error is None

    run(Stumbling(store.folder), scenario)


def test_closing_stops_the_threads_and_wakes_the_waiters(store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(8 * CHUNK_BYTES))
    source = CountingSource(store.folder)
    source.gate.clear()
    held: list[Segment] = []

    async def scenario(segments: SegmentStore) -> None:
        held.append(await segments.acquire(checkpoint, ONE))

    run(source, scenario)

    control = held[0].control
    assert control is not None
    with pytest.raises(native.SegmentFailed, match="cancelled"):
        control.wait(0, 0, 5.0)
    wait_until(lambda: not any(thread.name.startswith("store-") for thread in threading.enumerate()))
