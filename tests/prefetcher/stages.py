"""A model of layers in a store, a source with a gate, and scenarios over a node's segments."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from fleetstart import native
from fleetstart.prefetcher.segments.disk_cache import DiskCache
from fleetstart.prefetcher.segments.slab_memory import slab_size
from fleetstart.prefetcher.segments.store import Segment, SegmentStore
from fleetstart.prefetcher.sources.base import ObjectRange, Source
from fleetstart.prefetcher.sources.errors import ReadCancelled, SourceError
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from fleetstart.runtime.contract.node.reports import SegmentReport
from fleetstart.runtime.contract.weights.manifest import Manifest, Part, TensorEntry, checkpoint_id, manifest_bytes
from fleetstart.runtime.contract.weights.stage import stage_chunks
from tests.prefetcher.nodes import CHUNK_BYTES, Store
from tests.servers import wait_until

ONE, TWO, THREE = WorkerId("w-1"), WorkerId("w-2"), WorkerId("w-3")
SLAB_BYTES = slab_size(1 << 30)
LAYERS = 8
LAYER_CHUNKS = 3
Scenario = Callable[[SegmentStore], Coroutine[Any, Any, None]]


class Model:
    """A model of one chunk of embedding, then layers of a whole number of chunks."""

    def __init__(self, store: Store, *, layer_chunks: int = LAYER_CHUNKS, layers: int = LAYERS) -> None:
        sizes = [CHUNK_BYTES, *[layer_chunks * CHUNK_BYTES] * layers]
        self.data = os.urandom(sum(sizes))
        tensors, offset = {}, 0
        for number, size in enumerate(sizes):
            name = f"layers.{number - 1}.w" if number else "embed"
            tensors[name] = TensorEntry(offset, size, "U8", (size,), number - 1)
            offset += size
        pieces = [self.data[at : at + CHUNK_BYTES] for at in range(0, len(self.data), CHUNK_BYTES)]
        self.manifest = Manifest(
            chunk_bytes=CHUNK_BYTES,
            total_bytes=len(self.data),
            parts=[Part(object="part", header_bytes=4096, data_bytes=len(self.data), segment_offset=0)],
            chunks=[native.xxh3(piece) for piece in pieces],
            tensors=tensors,
        )
        encoded = manifest_bytes(self.manifest)
        self.checkpoint: CheckpointId = checkpoint_id(encoded)
        store.put(f"checkpoints/{self.checkpoint}/manifest.json", encoded)
        store.put(f"checkpoints/{self.checkpoint}/part", bytes(4096) + self.data)
        self.path = store.path(f"checkpoints/{self.checkpoint}/part")

    def chunks(self, first: int, end: int) -> set[int]:
        return set(stage_chunks(self.manifest, first, end))

    @property
    def everything(self) -> set[int]:
        return set(range(len(self.manifest.chunks)))


class Gated(FolderSource):
    """A source that counts its reads, fails on demand, or waits at a gate. Yields chunks one by one."""

    run_bytes = 1
    threads = 4

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.given: list[int] = []
        self.paced: set[int] = set()
        self.broken = False
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = 0
        self.lock = threading.Lock()

    def read(self, asked: ObjectRange, stopped: Callable[[], bool]) -> Iterator[int]:
        chunk = (asked.offset - 4096) // CHUNK_BYTES
        with self.lock:
            self.waiting += 1
        try:
            while not self.gate.wait(0.01):
                if stopped():
                    raise ReadCancelled(asked.key)
        finally:
            with self.lock:
                self.waiting -= 1
        if self.broken:
            raise SourceError("the store is gone")
        for number, checksum in enumerate(super().read(asked, stopped)):
            self.given.append(chunk + number)
            if asked.throttle is not None:
                self.paced.add(chunk + number)
            yield checksum


def run(source: Source, scenario: Scenario, *, memory_bytes: int = 1 << 30, disk: DiskCache | None = None) -> None:
    async def main() -> None:
        segments = SegmentStore(source=source, memory_bytes=memory_bytes, workers_bytes=lambda: 0, threads=4, disk=disk)
        try:
            async with asyncio.timeout(60):
                await scenario(segments)
        finally:
            await segments.close()

    asyncio.run(main())
    wait_until(lambda: not reading())


def reading() -> int:
    """Number of threads that are reading the store."""
    return sum(thread.name.startswith("store-") for thread in threading.enumerate())


async def until(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what=what)


def there(report: SegmentReport) -> set[int]:
    return {chunk for begin, end in report.ranges for chunk in range(begin, end)}


def state(segment: Segment) -> str:
    return segment.state


def right(segment: Segment, model: Model, chunks: set[int]) -> bool:
    """True if a worker that attached at the start sees the right bytes of these chunks."""
    fds = [os.dup(fd) for fd in segment.descriptors()[1:]]
    region = native.Region.attach(fds, len(model.data))
    return all(
        region.view(chunk * CHUNK_BYTES, CHUNK_BYTES) == model.data[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
        for chunk in chunks
    )


async def filled(
    segments: SegmentStore, model: Model, worker: WorkerId, stage: tuple[int, int] | None = None
) -> Segment:
    """The worker's segment, once its chunks have come or failed."""
    segment = await segments.acquire(model.checkpoint, worker, stage)
    await segment.filled.wait()
    return segment


async def growing(segments: SegmentStore, segment: Segment, gated: Gated) -> asyncio.Task[None]:
    """A growth whose first read waits at the gate."""
    gated.gate.clear()
    growth = asyncio.create_task(segments.grow(segment))
    await until(lambda: gated.waiting == 1, "a read")
    return growth
