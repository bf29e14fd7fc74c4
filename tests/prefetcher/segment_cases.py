"""A node's segments for the time of a scenario, and sources that count reads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetstart import native
from fleetstart.prefetcher.segments.disk_cache import DiskCache
from fleetstart.prefetcher.segments.slab_memory import slab_size
from fleetstart.prefetcher.segments.store import Segment, SegmentStore
from fleetstart.prefetcher.sources.base import ObjectRange, Source
from fleetstart.prefetcher.sources.errors import ReadCancelled
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from tests.prefetcher.nodes import Store

ONE, TWO = WorkerId("w-1"), WorkerId("w-2")
SLAB_BYTES = slab_size(1 << 30)
Scenario = Callable[[SegmentStore], Coroutine[Any, Any, None]]


def run(
    source: Source,
    scenario: Scenario,
    *,
    memory_bytes: int = 1 << 30,
    workers_bytes: int = 0,
    keep_idle: bool = True,
    disk: DiskCache | None = None,
    reject: Callable[[Collection[WorkerId], FleetError], None] = lambda workers, error: None,
) -> None:
    async def main() -> None:
        segments = SegmentStore(
            source=source,
            memory_bytes=memory_bytes,
            workers_bytes=lambda: workers_bytes,
            threads=4,
            keep_idle=keep_idle,
            disk=disk,
            reject=reject,
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
    """The bytes that a worker sees."""
    return bytes(native.Region.attach([os.dup(fd) for fd in segment.descriptors()[1:]], size_bytes).view(0, size_bytes))


async def failure_of(segments: SegmentStore, checkpoint: CheckpointId) -> FleetError:
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


class CountingSource(FolderSource):
    """A source that counts chunks, yields them one by one, and can hold them at a gate."""

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

    def read(self, asked: ObjectRange, stopped: Callable[[], bool]) -> Iterator[int]:
        while not self.gate.wait(0.01):
            if stopped():
                raise ReadCancelled(asked.key)
        self.reads[asked.key, asked.offset] += 1
        yield from super().read(asked, stopped)
