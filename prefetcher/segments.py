"""The node's segments: one a checkpoint, shared by every worker that uses it, warm until room is needed.

A segment opens when an order needs it: its manifest is read, room is made, memory and control block are
created and the fetch begins; workers attach while it fills. Workers pin it. Without pins it stays, until
`cache` says that it must give way. One that failed is forgotten at once, so that the next start tries
again; its waiters have learnt why from the control block. Everything here runs on the event loop, except
the fetch's own threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Literal

from fleetstart import native
from fleetstart.prefetcher.bandwidth import Bandwidths
from fleetstart.prefetcher.cache import Held, choose_evictions
from fleetstart.prefetcher.disk import DiskImage, DiskTier
from fleetstart.prefetcher.fetch import Fetch, Lane, StoreChunks, fetch_manifest
from fleetstart.prefetcher.memory import SegmentMemory
from fleetstart.prefetcher.sources import DISK_THREADS, Source
from fleetstart.prefetcher.threads import in_thread
from fleetstart.runtime.contract.errors import CheckpointInvalid, FleetError, Unavailable, WeightsMissing
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from fleetstart.runtime.contract.manifest import ChunkRange, Manifest, chunk_ranges, read_manifest
from fleetstart.runtime.contract.messages import SegmentReport

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Segment:
    """One checkpoint in memory. `fetch_span_ns` is (begin, end); end is 0 while it fills."""

    def __init__(self, checkpoint: CheckpointId, opened: asyncio.Future[None]) -> None:
        self.checkpoint = checkpoint
        self.opened = opened
        self.filled = asyncio.Event()
        """Ready or failed."""
        self.pins: set[WorkerId] = set()
        self.uses = 0
        self.last_used_ns = time.monotonic_ns()
        self.fetch_span_ns = (time.monotonic_ns(), 0)
        self.error: FleetError | None = None
        self.size_bytes = 0
        """What it takes of the node's memory, from the moment at which room was made."""
        self.region: native.Region | None = None
        self.control: native.ControlBlock | None = None
        self.fetch: Fetch | None = None

    @property
    def state(self) -> Literal["filling", "ready", "failed"]:
        if self.error is not None:
            return "failed"
        return "ready" if self.filled.is_set() else "filling"

    def descriptors(self) -> list[int]:
        """Control block, slabs: still ours; passing them on duplicates them."""
        assert self.region is not None
        assert self.control is not None
        return [self.control.fd, *self.region.fds]

    def report(self) -> SegmentReport:
        ready_bytes = self.fetch.ready_bytes if self.fetch is not None else 0
        size_bytes = self.region.size_bytes if self.region is not None else 0
        return SegmentReport(self.checkpoint, self.state, size_bytes, ready_bytes)


class Segments:
    def __init__(
        self,
        *,
        source: Source,
        memory_bytes: int,
        workers_bytes: Callable[[], int],
        threads: int,
        keep_bytes: int = 0,
        disk: DiskTier | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`workers_bytes` tells what workers have been promised of `memory_bytes`; `changed` is called at events."""
        self._source = source
        self._memory_bytes = memory_bytes
        self._workers_bytes = workers_bytes
        self._threads = threads
        self._changed = changed
        self._disk = disk
        self.memory = SegmentMemory(budget_bytes=memory_bytes, keep_bytes=keep_bytes, others_bytes=workers_bytes)
        self.bandwidths = Bandwidths()
        self._segments: dict[CheckpointId, Segment] = {}
        self._retired: list[Segment] = []
        """Failed, but still attached by workers that have not ended: their memory counts."""
        self._opening: set[asyncio.Task[None]] = set()
        self._generation = 0
        self.evictions = 0

    @property
    def used_bytes(self) -> int:
        return sum(segment.size_bytes for segment in (*self._segments.values(), *self._retired))

    @property
    def disk_bytes(self) -> int:
        return self._disk.used_bytes if self._disk is not None else 0

    def reports(self) -> list[SegmentReport]:
        return [segment.report() for segment in self._segments.values()]

    def is_ready(self, checkpoint: CheckpointId) -> bool:
        segment = self._segments.get(checkpoint)
        return segment is not None and segment.state == "ready"

    async def acquire(self, checkpoint: CheckpointId, worker: WorkerId) -> Segment:
        """The segment, opened and pinned by the worker; perhaps still filling. Callers bring the deadline.

        Errors: WeightsMissing, CheckpointInvalid, StoreFailed, Unavailable (no room, with the figures).
        """
        segment = self._segments.get(checkpoint)
        if segment is None:
            segment = self._begin(checkpoint)
        segment.pins.add(worker)
        segment.uses += 1
        segment.last_used_ns = time.monotonic_ns()
        try:
            await asyncio.shield(segment.opened)
        except BaseException:
            self.release(segment, worker)
            raise
        return segment

    def release(self, segment: Segment, worker: WorkerId) -> None:
        segment.pins.discard(worker)
        segment.last_used_ns = time.monotonic_ns()
        if not segment.pins and segment in self._retired:
            self._retired.remove(segment)
            self._let_go(segment)
            self._changed()

    def first(self, segment: Segment, first: int, last: int) -> None:
        """Chunks first to last before the others, of those that there are and nobody fetches yet."""
        if segment.fetch is not None and segment.control is not None:
            segment.fetch.first(range(max(0, first), min(last + 1, segment.control.chunk_count)))

    async def acquire_all(self, checkpoints: Sequence[CheckpointId], worker: WorkerId) -> list[Segment]:
        """All of them or none. Errors: as of `acquire`."""
        acquired: list[Segment] = []
        try:
            for checkpoint in checkpoints:
                acquired.append(await self.acquire(checkpoint, worker))
        except BaseException:
            for segment in acquired:
                self.release(segment, worker)
            raise
        return acquired

    def make_room(self, needed_bytes: int, purpose: str) -> None:
        """Gives up segments until that much is free beside workers and segments. Unavailable, with the figures."""
        workers_bytes = self._workers_bytes()
        free_bytes = self._memory_bytes - workers_bytes - self.used_bytes
        chosen = choose_evictions(needed_bytes, free_bytes, self._held(), time.monotonic())
        if chosen is None:
            pinned_bytes = self.used_bytes - sum(entry.size_bytes for entry in self._held() if not entry.pinned)
            raise Unavailable(
                f"{purpose} needs {needed_bytes:,} bytes; of the node's {self._memory_bytes:,}, workers have "
                f"{workers_bytes:,} and segments in use {pinned_bytes:,}",
                hint="wait for workers to end, lower the functions' memory, or raise FS_NODE_MEMORY",
                retry_after_s=5.0,
            )
        for checkpoint in chosen:
            segment = self._segments.pop(checkpoint)
            self.evictions += 1
            log.info("segment evicted", extra={"checkpoint": checkpoint, "size_bytes": segment.size_bytes})
            self._let_go(segment)
        if chosen:
            self._changed()

    def _let_go(self, segment: Segment) -> None:
        """The memory goes back to the pool with its last reference."""
        segment.region = None
        segment.control = None
        segment.fetch = None
        self.memory.tend()

    async def close(self) -> None:
        """Stops every fetch within the deadline and lets all memory go."""
        for task in list(self._opening):
            task.cancel()
        fetches = [segment.fetch for segment in self._segments.values() if segment.fetch and segment.state == "filling"]
        self._segments.clear()
        self._retired.clear()
        for fetch in fetches:
            await in_thread(lambda fetch=fetch: fetch.close(CLOSE_TIMEOUT_S), "close-fetch")  # type: ignore[misc]
        if self._disk is not None:
            self._disk.close()
        self.memory.close()

    def _held(self) -> list[Held]:
        return [
            Held(
                checkpoint=segment.checkpoint,
                size_bytes=segment.size_bytes,
                fetch_s=(segment.fetch_span_ns[1] - segment.fetch_span_ns[0]) / 1e9,
                uses=segment.uses,
                last_used_s=segment.last_used_ns / 1e9,
                pinned=bool(segment.pins) or segment.state == "filling",
            )
            for segment in self._segments.values()
        ]

    def _begin(self, checkpoint: CheckpointId) -> Segment:
        if not _DIGEST.fullmatch(checkpoint):
            raise WeightsMissing(f"{checkpoint!r} is not the id of a checkpoint")
        segment = Segment(checkpoint, asyncio.get_running_loop().create_future())
        self._segments[checkpoint] = segment
        task = asyncio.create_task(self._open(segment), name=f"open-{checkpoint[:8]}")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return segment

    async def _open(self, segment: Segment) -> None:
        checkpoint = segment.checkpoint
        try:
            kept = self._disk.manifest(checkpoint) if self._disk is not None else None
            manifest, data = await in_thread(lambda: self._read_manifest(checkpoint, kept), f"open-{checkpoint[:8]}")
            await self._reserve(segment, manifest)
            self._create(segment, manifest, data)
        except asyncio.CancelledError:
            self._failed_to_open(segment, Unavailable("the node is going down", retry_after_s=1.0))
            raise
        except FleetError as error:
            self._failed_to_open(segment, error)
        except OSError as error:
            self._failed_to_open(segment, Unavailable(f"checkpoint {checkpoint[:12]}: no memory for it: {error}"))
        except Exception as error:
            log.exception("a segment failed to open in an unforeseen way")
            self._failed_to_open(segment, FleetError(f"checkpoint {checkpoint[:12]}: {type(error).__name__}: {error}"))

    def _read_manifest(self, checkpoint: CheckpointId, kept: bytes | None) -> tuple[Manifest, bytes]:
        """In a thread: a large one takes a while to check."""
        data = kept if kept is not None else fetch_manifest(self._source, checkpoint)
        return read_manifest(data, checkpoint), data

    async def _reserve(self, segment: Segment, manifest: Manifest) -> None:
        """Memory, of the budget and in fact. Errors: Unavailable, CheckpointInvalid."""
        name = f"checkpoint {segment.checkpoint[:12]}"
        if manifest.total_bytes == 0:
            raise CheckpointInvalid(f"{name} has no bytes")
        size_bytes = self.memory.rounded(manifest.total_bytes)
        if size_bytes > self.memory.capacity_bytes:
            raise Unavailable(
                f"{name} needs {size_bytes:,} bytes of memory for weights, the node has {self.memory.capacity_bytes:,}",
                hint="raise FS_NODE_MEMORY, or use a node with more memory",
            )
        self.make_room(size_bytes, name)
        segment.size_bytes = size_bytes  # taken from here on, whoever else asks meanwhile
        segment.region = await in_thread(lambda: self.memory.take(manifest.total_bytes), f"memory-{name[11:19]}")

    def _create(self, segment: Segment, manifest: Manifest, data: bytes) -> None:
        checkpoint = segment.checkpoint
        assert segment.region is not None
        self._generation += 1
        segment.control = native.ControlBlock.create(
            f"fs-{checkpoint[:12]}-control", len(manifest.chunks), data, self._generation
        )
        loop = asyncio.get_running_loop()

        def on_end(error: FleetError | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended
                loop.call_soon_threadsafe(self._ended, segment, error)

        image = self._disk_image(checkpoint, manifest, data)
        segment.fetch = Fetch(
            checkpoint=checkpoint,
            region=segment.region,
            control=segment.control,
            lanes=self._lanes(checkpoint, manifest, image),
            on_end=on_end,
            on_chunk=self._write_behind(image, segment.region),
        )
        segment.fetch.start()
        segment.opened.set_result(None)
        self._changed()

    def _disk_image(self, checkpoint: CheckpointId, manifest: Manifest, data: bytes) -> DiskImage | None:
        if self._disk is None:
            return None
        if self._disk.manifest(checkpoint) is None:
            self._disk.keep(checkpoint, manifest, data, set(self._segments))
        return self._disk.image(checkpoint)

    def _lanes(self, checkpoint: CheckpointId, manifest: Manifest, image: DiskImage | None) -> list[Lane]:
        """The disk for what it has, the store for the rest, and for what the disk turns out not to have."""
        chunks = chunk_ranges(manifest)
        there = image.present(chunks) if image is not None else []
        indices = {chunk.index for chunk in there}
        elsewhere = [chunk for chunk in chunks if chunk.index not in indices]
        lanes = [
            Lane(StoreChunks(self._source, checkpoint, manifest), elsewhere, self._source.threads or self._threads)
        ]
        if image is not None and there:
            lanes.insert(0, Lane(image, there, DISK_THREADS))
        return lanes

    def _write_behind(self, image: DiskImage | None, region: native.Region) -> Callable[[ChunkRange, str], None]:
        disk, memory = self._disk, weakref.ref(region)

        def keep(chunk: ChunkRange, source: str) -> None:
            held = memory()
            if disk is not None and image is not None and held is not None and source != image.name:
                disk.write_behind(image, chunk, held)

        return keep

    def _failed_to_open(self, segment: Segment, error: FleetError) -> None:
        segment.error = error
        self._segments.pop(segment.checkpoint, None)
        self._let_go(segment)
        segment.filled.set()
        if not segment.opened.done():
            segment.opened.set_exception(error)
            segment.opened.exception()  # whoever waited sees it; nobody having waited is no fault

    def _ended(self, segment: Segment, error: FleetError | None) -> None:
        segment.fetch_span_ns = (segment.fetch_span_ns[0], time.monotonic_ns())
        segment.error = error
        segment.filled.set()
        self.memory.tend()
        if segment.fetch is not None:
            for source, (size_bytes, busy_s) in segment.fetch.traffic().items():
                self.bandwidths.note(source, size_bytes, busy_s)
        if error is None:
            log.info("segment ready", extra={"checkpoint": segment.checkpoint, "size_bytes": segment.size_bytes})
        else:
            log.warning("segment failed", extra={"checkpoint": segment.checkpoint, "error": error.message})
            if self._segments.get(segment.checkpoint) is segment:
                del self._segments[segment.checkpoint]
                if segment.pins:
                    self._retired.append(segment)
                else:
                    self._let_go(segment)
        self._changed()
