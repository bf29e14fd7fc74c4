"""The node's segments: one a checkpoint, shared by every worker that uses it, warm until room is needed.

A segment opens when an order needs it: its manifest is read, `room` is made, memory taken and the fetch begun as
`opening` does it; workers attach while it fills. Workers pin it. Without pins it stays until it must give way. One
that failed is forgotten at once, so that the next start tries again; its waiters have learnt why from the control
block. Everything here runs on the event loop, except the fetch's own threads.

A stage of a pipeline has its own chunks fetched and no others, and memory for them and no more (HydraServe section
4.1). Stages of one checkpoint share its segment, which then holds what any of them needs. Later a segment may grow
into the whole checkpoint: behind the back of its workers, who serve meanwhile, or at once, when somebody waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence

from fleetstart.runtime.contract.errors import FleetError, Unavailable, WeightsMissing
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from fleetstart.runtime.contract.node.reports import SegmentReport
from fleetstart.runtime.contract.object_keys import is_digest

from ..concurrency.blocking import in_thread
from ..fetch.bandwidth import Bandwidths
from ..fetch.chunk_sources import StoreChunks
from ..sources.base import Source
from ..sources.throttle import BackgroundThrottle
from .disk_cache import DiskCache
from .memory_budget import MemoryBudget
from .opener import SegmentOpener
from .segment import Layers, Segment

__all__ = ["Layers", "Segment", "SegmentStore"]

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0


class SegmentStore:
    def __init__(
        self,
        *,
        source: Source,
        memory_bytes: int,
        workers_bytes: Callable[[], int],
        threads: int,
        keep_bytes: int = 0,
        keep_idle: bool = True,
        disk: DiskCache | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`workers_bytes` tells what workers have been promised of `memory_bytes`; `changed` is called at events.
        Without `keep_idle`, a segment goes with its last worker."""
        self._changed = changed
        self._disk = disk
        self.budget = MemoryBudget(
            memory_bytes=memory_bytes,
            workers_bytes=workers_bytes,
            keep_bytes=keep_bytes,
            keep_idle=keep_idle,
            changed=changed,
        )
        self.bandwidths = Bandwidths()
        self._throttle = BackgroundThrottle()
        self._opener = SegmentOpener(source=source, disk=disk, threads=threads, throttle=self._throttle)
        self._opening: set[asyncio.Task[None]] = set()

    @property
    def disk_bytes(self) -> int:
        return self._disk.used_bytes if self._disk is not None else 0

    @property
    def fetched_bytes(self) -> dict[str, int]:
        """By source, since the daemon began."""
        return self._opener.fetched.sums()

    def traffic(self, checkpoint: CheckpointId) -> dict[str, int]:
        """Bytes that each source gave so far to those who waited for the checkpoint, as long as it is here."""
        segment = self.budget.segments.get(checkpoint)
        if segment is None or segment.fetch is None:
            return {}
        return {source: size_bytes for source, (size_bytes, _) in segment.fetch.traffic().items()}

    def reports(self) -> list[SegmentReport]:
        return [segment.report() for segment in self.budget.segments.values()]

    def disk_ranges(self) -> dict[CheckpointId, list[tuple[int, int]]]:
        """(begin, end) of the chunks that the disk has of each checkpoint."""
        return self._disk.ranges() if self._disk is not None else {}

    def is_ready(self, checkpoint: CheckpointId, stage: Layers | None = None) -> bool:
        """Whether whoever acquires it would find all that it needs."""
        segment = self.budget.segments.get(checkpoint)
        if segment is None or segment.error is not None or segment.fetch is None:
            return False
        return segment.fetch.progress.has(segment.needed(stage))

    async def acquire(self, checkpoint: CheckpointId, worker: WorkerId, stage: Layers | None = None) -> Segment:
        """The segment, opened and pinned by the worker; perhaps still filling. Callers bring the deadline.

        Of a stage, what others want of it is not its concern; None wants the whole checkpoint.

        Errors: WeightsMissing, CheckpointInvalid, StoreFailed, Unavailable (no room, with the figures).
        """
        segment = self.budget.segments.get(checkpoint)
        if segment is None:
            segment = self._open_segment(checkpoint, stage)
        segment.pins.add(worker)
        segment.uses += 1
        segment.last_used_ns = time.monotonic_ns()
        try:
            await asyncio.shield(segment.opened)
            if segment.error is None:  # else the worker learns it from the control block
                self._want(segment, segment.needed(stage))
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
        segment.end_growths(Unavailable(f"nobody uses checkpoint {segment.checkpoint[:12]} here any more"))
        if segment.fetch is not None:
            segment.fetch.progress.stop_growing()
        self.budget.on_unpinned(segment)

    # ── more of a segment than was asked for ───────────────────────────────────────────────────────

    def prioritize(self, segment: Segment, first: int, last: int) -> None:
        """Somebody waits for chunks first to last: they come before all others, also those that nobody had asked for.

        If there is no memory for them, the segment fails, and whoever waits learns that; what is there stays there.
        """
        if segment.fetch is None or segment.control is None or segment.error is not None:
            return
        chunks = range(max(0, first), min(last + 1, segment.control.chunk_count))
        try:
            self._want(segment, chunks)
        except FleetError as error:
            segment.fetch.fail(error)
            return
        segment.fetch.progress.prioritize(chunks)

    def hurry(self, segment: Segment) -> None:
        """The rest of the checkpoint is wanted now, as fast as it comes: somebody must go on without the others.

        Errors: Unavailable if there is no room, with the figures; the segment's own.
        """
        self._want(segment, segment.needed(None))

    async def grow(self, segment: Segment) -> None:
        """Returns when the whole checkpoint is there. It comes once all is there that anybody waits for, slowly
        enough not to be felt on the link; it stops when nobody awaits this any more.

        Errors: Unavailable if there is no room, with the figures; StoreFailed and whatever else kept it from coming.
        Those who serve what is there go on, and it may be tried again, unless the segment itself has failed.
        """
        fetch = segment.require_fetch()
        self.budget.grant(segment, fetch.progress.unwanted(segment.needed(None)))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        segment.growths.add(done)
        fetch.grow()
        try:
            if not fetch.progress.is_whole:
                await done
        finally:
            segment.growths.discard(done)
            if not segment.growths:
                fetch.progress.stop_growing()

    def _want(self, segment: Segment, chunks: Collection[int]) -> None:
        """They are wanted too. Errors: Unavailable if there is no room, the segment's own."""
        fetch = segment.require_fetch()
        new = fetch.progress.unwanted(chunks)
        if not new:
            return
        self.budget.grant(segment, new)
        segment.start_filling(time.monotonic_ns())
        fetch.want(new)
        if fetch.progress.is_filled:  # some came meanwhile, behind our back
            self._on_filled(segment, None)
        self._changed()

    # ── opening ────────────────────────────────────────────────────────────────────────────────────

    def _open_segment(self, checkpoint: CheckpointId, stage: Layers | None) -> Segment:
        if not is_digest(checkpoint):
            raise WeightsMissing(f"{checkpoint!r} is not the id of a checkpoint")
        segment = Segment(checkpoint, asyncio.get_running_loop().create_future())
        self.budget.segments[checkpoint] = segment
        task = asyncio.create_task(self._open(segment, stage), name=f"open-{checkpoint[:8]}")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return segment

    async def _open(self, segment: Segment, stage: Layers | None) -> None:
        """For the first who asks; the others ask once it is open."""
        checkpoint = segment.checkpoint
        try:
            segment.manifest, data = await self._opener.read_manifest(checkpoint)
            chunks = segment.needed(stage)
            await self.budget.allocate(segment, chunks)
            self._opener.start_fetch(
                segment,
                data,
                chunks,
                slab_bytes=self.budget.memory.slab_bytes,
                in_use=set(self.budget.segments),
                on_filled=self._on_filled,
                on_grown=self._on_grown,
            )
            segment.opened.set_result(None)
            self._changed()
        except asyncio.CancelledError:
            self._fail_open(segment, Unavailable("the node is going down", retry_after_s=1.0))
            raise
        except FleetError as error:
            self._fail_open(segment, error)
        except OSError as error:
            self._fail_open(segment, Unavailable(f"checkpoint {checkpoint[:12]}: no memory for it: {error}"))
        except Exception as error:
            log.exception("a segment failed to open in an unforeseen way")
            self._fail_open(segment, FleetError(f"checkpoint {checkpoint[:12]}: {type(error).__name__}: {error}"))

    def _fail_open(self, segment: Segment, error: FleetError) -> None:
        segment.error = error
        self.budget.discard(segment)
        segment.filled.set()
        if not segment.opened.done():
            segment.opened.set_exception(error)
            segment.opened.exception()  # whoever waited sees it; nobody having waited is no fault

    # ── what becomes of a fetch ────────────────────────────────────────────────────────────────────

    def _on_filled(self, segment: Segment, error: FleetError | None) -> None:
        """All that is wanted is there, or will not come."""
        if segment.fetch is None or segment.error is not None:
            return
        if error is None and (segment.filled.is_set() or not segment.fetch.progress.is_filled):
            return  # told before, or more was wanted meanwhile
        segment.error = error
        segment.stop_filling(time.monotonic_ns())
        self.budget.memory.replenish()
        self._note_traffic(segment)
        extra = {"checkpoint": segment.checkpoint, "size_bytes": segment.size_bytes}
        if error is None:
            log.info("segment ready" if segment.fetch.progress.is_whole else "segment has its stages", extra=extra)
        else:
            log.warning("segment failed", extra={**extra, "error": error.message})
            segment.end_growths(error)
            self.budget.retire(segment)
        self._changed()

    def _on_grown(self, segment: Segment, error: FleetError | None) -> None:
        """The whole checkpoint is there, or its growth ended before."""
        if error is None:
            log.info("segment whole", extra={"checkpoint": segment.checkpoint, "size_bytes": segment.size_bytes})
        segment.end_growths(error)
        self._changed()

    def _note_traffic(self, segment: Segment) -> None:
        for source, (size_bytes, busy_s) in segment.new_traffic().items():
            self.bandwidths.note(source, size_bytes, busy_s)
        if bytes_per_s := self.bandwidths.bytes_per_s().get(StoreChunks.name):
            self._throttle.set_measured(bytes_per_s)

    # ── the end ────────────────────────────────────────────────────────────────────────────────────

    async def close(self) -> None:
        """Stops every fetch within the deadline and lets all memory go."""
        for task in list(self._opening):
            task.cancel()
        found = [segment.fetch for segment in self.budget.segments.values() if segment.fetch is not None]
        self.budget.segments.clear()
        for fetch in found:
            if not fetch.progress.is_whole:
                await in_thread(lambda fetch=fetch: fetch.close(CLOSE_TIMEOUT_S), "close-fetch")  # type: ignore[misc]
        if self._disk is not None:
            self._disk.close()
        self.budget.close()
