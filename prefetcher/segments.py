"""The node's segments: one a checkpoint, shared by every worker that uses it, warm until room is needed.

A segment opens when an order needs it: its manifest is read, room is made, memory and control block are
created and the fetch begins; workers attach while it fills. Workers pin it. Without pins it stays, until
`cache` says that it must give way. One that failed is forgotten at once, so that the next start tries
again; its waiters have learnt why from the control block. Everything here runs on the event loop, except
the fetch's own threads.

A stage of a pipeline has its own chunks fetched and no others, and memory for them and no more (HydraServe section
4.1). Stages of one checkpoint share its segment, which then holds what any of them needs. Later a segment may grow
into the whole checkpoint: behind the back of its workers, who serve meanwhile, or at once, when somebody waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import weakref
from collections.abc import Callable, Collection, Sequence

from fleetstart import native
from fleetstart.prefetcher.bandwidth import Bandwidths
from fleetstart.prefetcher.cache import Held, choose_evictions
from fleetstart.prefetcher.disk import DiskImage, DiskTier
from fleetstart.prefetcher.fetch import Fetch
from fleetstart.prefetcher.lanes import Lane, StoreChunks
from fleetstart.prefetcher.memory import SegmentMemory
from fleetstart.prefetcher.pace import Pace
from fleetstart.prefetcher.retries import with_retries
from fleetstart.prefetcher.segment import Layers, Segment
from fleetstart.prefetcher.sources import DISK_THREADS, ObjectMissing, Source
from fleetstart.prefetcher.threads import in_thread
from fleetstart.runtime.contract.errors import CheckpointInvalid, FleetError, Unavailable, WeightsMissing
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from fleetstart.runtime.contract.manifest import (
    MANIFEST_MAX_BYTES,
    MANIFEST_OBJECT,
    ChunkRange,
    Manifest,
    checkpoint_key,
    chunk_ranges,
    read_manifest,
)
from fleetstart.runtime.contract.messages import SegmentReport

__all__ = ["Layers", "Segment", "Segments"]

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


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
        self._pace = Pace()
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

    def disk_ranges(self) -> dict[CheckpointId, list[tuple[int, int]]]:
        """(begin, end) of the chunks that the disk has of each checkpoint."""
        return self._disk.ranges() if self._disk is not None else {}

    def is_ready(self, checkpoint: CheckpointId, stage: Layers | None = None) -> bool:
        """Whether whoever acquires it would find all that it needs."""
        segment = self._segments.get(checkpoint)
        if segment is None or segment.error is not None or segment.fetch is None:
            return False
        return segment.fetch.filling.has(segment.needed(stage))

    async def acquire(self, checkpoint: CheckpointId, worker: WorkerId, stage: Layers | None = None) -> Segment:
        """The segment, opened and pinned by the worker; perhaps still filling. Callers bring the deadline.

        Of a stage, what others want of it is not its concern; None wants the whole checkpoint.

        Errors: WeightsMissing, CheckpointInvalid, StoreFailed, Unavailable (no room, with the figures).
        """
        segment = self._segments.get(checkpoint)
        if segment is None:
            segment = self._begin(checkpoint, stage)
        segment.pins.add(worker)
        segment.uses += 1
        segment.last_used_ns = time.monotonic_ns()
        try:
            await asyncio.shield(segment.opened)
            if segment.error is None:  # else the worker learns it from the control block
                self._ask(segment, segment.needed(stage))
        except BaseException:
            self.release(segment, worker)
            raise
        return segment

    async def acquire_all(
        self, checkpoints: Sequence[CheckpointId], worker: WorkerId, stage: Layers | None = None
    ) -> list[Segment]:
        """All of them or none; the stage is one of the first, the others are whole. Errors: as of `acquire`."""
        acquired: list[Segment] = []
        try:
            for number, checkpoint in enumerate(checkpoints):
                acquired.append(await self.acquire(checkpoint, worker, stage if number == 0 else None))
        except BaseException:
            for segment in acquired:
                self.release(segment, worker)
            raise
        return acquired

    def release(self, segment: Segment, worker: WorkerId) -> None:
        segment.pins.discard(worker)
        segment.last_used_ns = time.monotonic_ns()
        if segment.pins:
            return
        self._end_growths(segment, Unavailable(f"nobody uses checkpoint {segment.checkpoint[:12]} here any more"))
        if segment.fetch is not None:
            segment.fetch.filling.stop_growing()
        if segment in self._retired:
            self._retired.remove(segment)
            self._let_go(segment)
            self._changed()

    # ── more of a segment than was asked for ───────────────────────────────────────────────────────

    def first(self, segment: Segment, first: int, last: int) -> None:
        """Somebody waits for chunks first to last: they come before all others, also those that nobody had asked for.

        If there is no memory for them, the segment fails, and whoever waits learns that; what is there stays there.
        """
        if segment.fetch is None or segment.control is None or segment.error is not None:
            return
        chunks = range(max(0, first), min(last + 1, segment.control.chunk_count))
        try:
            self._ask(segment, chunks)
        except FleetError as error:
            segment.fetch.fail(error)
            return
        segment.fetch.filling.first(chunks)

    def hurry(self, segment: Segment) -> None:
        """The rest of the checkpoint is wanted now, as fast as it comes: somebody must go on without the others.

        Errors: Unavailable if there is no room, with the figures; the segment's own.
        """
        self._ask(segment, segment.needed(None))

    async def grow(self, segment: Segment) -> None:
        """Returns when the whole checkpoint is there. It comes once all is there that anybody waits for, slowly
        enough not to be felt on the link; it stops when nobody awaits this any more.

        Errors: Unavailable if there is no room, with the figures; StoreFailed and whatever else kept it from coming.
        Those who serve what is there go on, and it may be tried again, unless the segment itself has failed.
        """
        fetch = self._living(segment)
        self._grant(segment, fetch.filling.unwanted(segment.needed(None)))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        segment.growths.add(done)
        fetch.grow()
        try:
            if not fetch.filling.is_whole:
                await done
        finally:
            segment.growths.discard(done)
            if not segment.growths:
                fetch.filling.stop_growing()

    def _ask(self, segment: Segment, chunks: Collection[int]) -> None:
        """They are wanted too. Errors: Unavailable if there is no room, the segment's own."""
        fetch = self._living(segment)
        new = fetch.filling.unwanted(chunks)
        if not new:
            return
        self._grant(segment, new)
        segment.fills(time.monotonic_ns())
        fetch.want(new)
        if fetch.filling.is_filled:  # some came meanwhile, behind our back
            self._ended(segment, None)
        self._changed()

    def _living(self, segment: Segment) -> Fetch:
        if segment.error is not None:
            raise segment.error
        if segment.fetch is None:
            raise Unavailable(f"checkpoint {segment.checkpoint[:12]} was given up", retry_after_s=1.0)
        return segment.fetch

    def _grant(self, segment: Segment, chunks: Collection[int]) -> None:
        """Memory for more of it. Errors: Unavailable, and nothing has changed."""
        assert segment.region is not None
        slabs = segment.slabs_of(chunks, self.memory.slab_bytes) - segment.granted
        if not slabs:
            return
        size_bytes = len(slabs) * self.memory.slab_bytes
        self.make_room(size_bytes, f"more of checkpoint {segment.checkpoint[:12]}")
        self.memory.grant(segment.region, slabs)
        segment.size_bytes += size_bytes
        segment.granted |= slabs

    def _end_growths(self, segment: Segment, error: FleetError | None) -> None:
        for growth in segment.growths:
            if growth.done():
                continue
            if error is None:
                growth.set_result(None)
            else:
                growth.set_exception(error)

    # ── room ───────────────────────────────────────────────────────────────────────────────────────

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
        """The memory goes back to the pool with its last reference, which a thread may have for a moment."""
        if segment.fetch is not None:
            segment.fetch.fail(Unavailable(f"checkpoint {segment.checkpoint[:12]} was given up"))
        segment.region = None
        segment.control = None
        segment.fetch = None
        self.memory.tend()

    async def close(self) -> None:
        """Stops every fetch within the deadline and lets all memory go."""
        for task in list(self._opening):
            task.cancel()
        found = [segment.fetch for segment in self._segments.values() if segment.fetch is not None]
        fetches = [fetch for fetch in found if not fetch.filling.is_whole]
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
                fetch_s=segment.fetch_s,
                uses=segment.uses,
                last_used_s=segment.last_used_ns / 1e9,
                pinned=bool(segment.pins) or segment.state == "filling",
            )
            for segment in self._segments.values()
        ]

    # ── opening ────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, checkpoint: CheckpointId, stage: Layers | None) -> Segment:
        if not _DIGEST.fullmatch(checkpoint):
            raise WeightsMissing(f"{checkpoint!r} is not the id of a checkpoint")
        segment = Segment(checkpoint, asyncio.get_running_loop().create_future())
        self._segments[checkpoint] = segment
        task = asyncio.create_task(self._open(segment, stage), name=f"open-{checkpoint[:8]}")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return segment

    async def _open(self, segment: Segment, stage: Layers | None) -> None:
        """For the first who asks; the others ask once it is open."""
        checkpoint = segment.checkpoint
        try:
            kept = self._disk.manifest(checkpoint) if self._disk is not None else None
            manifest, data = await in_thread(lambda: self._read_manifest(checkpoint, kept), f"open-{checkpoint[:8]}")
            segment.manifest = manifest
            await self._reserve(segment, manifest, segment.needed(stage))
            self._create(segment, manifest, data, segment.needed(stage))
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

    async def _reserve(self, segment: Segment, manifest: Manifest, chunks: Collection[int]) -> None:
        """Memory for these chunks, of the budget and in fact. Errors: Unavailable, CheckpointInvalid."""
        name = f"checkpoint {segment.checkpoint[:12]}"
        if manifest.total_bytes == 0:
            raise CheckpointInvalid(f"{name} has no bytes")
        slabs = segment.slabs_of(chunks, self.memory.slab_bytes)
        size_bytes = len(slabs) * self.memory.slab_bytes
        if size_bytes > self.memory.capacity_bytes:
            raise Unavailable(
                f"{name} needs {size_bytes:,} bytes of memory for weights, the node has {self.memory.capacity_bytes:,}",
                hint="raise FS_NODE_MEMORY, or use a node with more memory",
            )
        self.make_room(size_bytes, name)
        segment.size_bytes = size_bytes  # taken from here on, whoever else asks meanwhile
        segment.granted = slabs
        total_bytes = manifest.total_bytes
        segment.region = await in_thread(lambda: self.memory.take(total_bytes, slabs), f"memory-{name[11:19]}")

    def _create(self, segment: Segment, manifest: Manifest, data: bytes, chunks: Collection[int]) -> None:
        checkpoint = segment.checkpoint
        assert segment.region is not None
        self._generation += 1
        segment.control = native.ControlBlock.create(
            f"fs-{checkpoint[:12]}-control", len(manifest.chunks), data, self._generation
        )
        loop = asyncio.get_running_loop()

        def on_loop(told: Callable[[Segment, FleetError | None], None]) -> Callable[[FleetError | None], None]:
            def tell(error: FleetError | None) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended
                    loop.call_soon_threadsafe(told, segment, error)

            return tell

        image = self._disk_image(checkpoint, manifest, data)
        segment.fetch = Fetch(
            checkpoint=checkpoint,
            region=segment.region,
            slab_bytes=self.memory.slab_bytes,
            control=segment.control,
            lanes=self._lanes(checkpoint, manifest, image),
            on_filled=on_loop(self._ended),
            on_grown=on_loop(self._grown),
            on_chunk=self._write_behind(image, segment.region),
            pace=self._pace,
        )
        segment.fetch.want(chunks)
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

    # ── what becomes of a fetch ────────────────────────────────────────────────────────────────────

    def _ended(self, segment: Segment, error: FleetError | None) -> None:
        """All that is wanted is there, or will not come."""
        if segment.fetch is None or segment.error is not None:
            return
        if error is None and (segment.filled.is_set() or not segment.fetch.filling.is_filled):
            return  # told before, or more was wanted meanwhile
        segment.error = error
        segment.rests(time.monotonic_ns())
        self.memory.tend()
        self._note_traffic(segment)
        extra = {"checkpoint": segment.checkpoint, "size_bytes": segment.size_bytes}
        if error is None:
            log.info("segment ready" if segment.fetch.filling.is_whole else "segment has its stages", extra=extra)
        else:
            log.warning("segment failed", extra={**extra, "error": error.message})
            self._end_growths(segment, error)
            if self._segments.get(segment.checkpoint) is segment:
                del self._segments[segment.checkpoint]
                if segment.pins:
                    self._retired.append(segment)
                else:
                    self._let_go(segment)
        self._changed()

    def _grown(self, segment: Segment, error: FleetError | None) -> None:
        """The whole checkpoint is there, or its growth ended before."""
        if error is None:
            log.info("segment whole", extra={"checkpoint": segment.checkpoint, "size_bytes": segment.size_bytes})
        self._end_growths(segment, error)
        self._changed()

    def _note_traffic(self, segment: Segment) -> None:
        for source, (size_bytes, busy_s) in segment.new_traffic().items():
            self.bandwidths.note(source, size_bytes, busy_s)
        if bytes_per_s := self.bandwidths.bytes_per_s().get(StoreChunks.name):
            self._pace.measured(bytes_per_s)


def fetch_manifest(source: Source, checkpoint: CheckpointId) -> bytes:
    """Errors: WeightsMissing, CheckpointInvalid, StoreFailed. Blocks."""
    key = checkpoint_key(checkpoint, MANIFEST_OBJECT)
    try:
        return with_retries(lambda: source.read_object(key, MANIFEST_MAX_BYTES), f"manifest of {checkpoint[:12]}")
    except ObjectMissing as error:
        raise WeightsMissing(
            f"checkpoint {checkpoint[:12]} is not in the store: no object {key}",
            hint="deploy the function again, its weights are uploaded with it",
        ) from error
    except ValueError as error:
        raise CheckpointInvalid(str(error)) from error
