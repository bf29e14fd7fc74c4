"""The segment store of a node: one segment a checkpoint, shared by all its workers, warm until memory is needed.

A segment opens when an order needs it: its manifest is read, memory allocated and the fetch started; workers attach
while it fills. Workers pin it; without pins it stays until it is evicted. A segment that failed is dropped at once, so
that the next start tries again; its workers learn the reason from the control block. Everything here runs on the event
loop, except the fetch's own threads.

A pipeline stage has only its own chunks fetched, and memory for these alone (HydraServe section 4.1). Stages of one
checkpoint share its segment, which then holds the chunks of all of them. Later a segment may grow into the whole
checkpoint, in the background while its workers serve.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from fleetstart.runtime.contract.errors import FleetError, Unavailable, WeightsMissing
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from fleetstart.runtime.contract.node.reports import SegmentReport
from fleetstart.runtime.contract.object_keys import is_digest

from ..concurrency.threads import in_thread
from ..fetch.bandwidth import Bandwidths, kind_of
from ..fetch.chunk_sources import StoreChunks
from ..sources.base import Source
from ..sources.throttle import BackgroundThrottle
from .digest_check import CheckedDigests, DigestCheck, forgery_error
from .disk_cache import DiskCache
from .feeds import NO_FEED, Feed, OpenPeer
from .memory_budget import MemoryBudget
from .opener import SegmentOpener
from .segment import Layers, Segment

__all__ = ["Layers", "Segment", "SegmentStore", "verified"]

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0


class SegmentStore:
    """The segments of one node."""

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
        reclaim: Callable[[int], object] = lambda needed_bytes: None,
        reject: Callable[[Collection[WorkerId], FleetError], None] = lambda workers, error: None,
        open_peer: OpenPeer | None = None,
    ) -> None:
        """`workers_bytes` returns the part of `memory_bytes` that others have, of which `reclaim` may free some;
        `changed` is called at events; `reject` stops workers whose weights turn out to be forged; `open_peer` makes a
        source of a peer. Without `keep_idle`, a segment is freed with its last worker."""
        self._changed = changed
        self._disk = disk
        self.budget = MemoryBudget(
            memory_bytes=memory_bytes,
            workers_bytes=workers_bytes,
            keep_bytes=keep_bytes,
            keep_idle=keep_idle,
            changed=changed,
            reclaim=reclaim,
        )
        self.bandwidths = Bandwidths()
        self.throttle = BackgroundThrottle()
        self._opener = SegmentOpener(
            source=source, disk=disk, threads=threads, throttle=self.throttle, open_peer=open_peer
        )
        self._opening: set[asyncio.Task[None]] = set()
        self._reject = reject
        self._digests = DigestCheck(self._on_checked)
        self._distrusted: set[CheckpointId] = set()
        """Checkpoints of which forged chunks have come: until a check has passed, their workers wait for it."""

    @property
    def disk_bytes(self) -> int:
        return self._disk.used_bytes if self._disk is not None else 0

    @property
    def fetched_bytes(self) -> dict[str, int]:
        """Bytes by source, since the daemon started."""
        return self._opener.fetched.sums()

    def traffic(self, checkpoint: CheckpointId) -> dict[str, int]:
        """Bytes by source for a checkpoint in memory, without background reads."""
        segment = self.budget.segments.get(checkpoint)
        if segment is None or segment.fetch is None:
            return {}
        found: Counter[str] = Counter()
        for source, (size_bytes, _) in segment.fetch.traffic().items():
            found[kind_of(source)] += size_bytes
        return dict(found)

    def reports(self) -> list[SegmentReport]:
        return [segment.report() for segment in self.budget.segments.values()]

    def disk_ranges(self) -> dict[CheckpointId, list[tuple[int, int]]]:
        """(begin, end) of the chunks in the disk cache, by checkpoint."""
        return self._disk.ranges() if self._disk is not None else {}

    def is_ready(self, checkpoint: CheckpointId, stage: Layers | None = None) -> bool:
        """True if all chunks of the stage (None: of the checkpoint) are present."""
        segment = self.budget.segments.get(checkpoint)
        if segment is None or segment.error is not None or segment.fetch is None:
            return False
        return segment.fetch.progress.has(segment.needed(stage))

    async def acquire(
        self, checkpoint: CheckpointId, worker: WorkerId, stage: Layers | None = None, feed: Feed = NO_FEED
    ) -> Segment:
        """The segment, opened and pinned by the worker; possibly still filling. Callers set the deadline.

        `stage` limits what is fetched; None wants the whole checkpoint. `feed` names peers that have chunks of it.

        Errors: WeightsMissing, CheckpointInvalid, StoreFailed, Unavailable (no memory, with the figures).
        """
        segment = self.budget.segments.get(checkpoint)
        if segment is None:
            segment = self._open_segment(checkpoint, stage, self._trusted(checkpoint, feed))
        segment.pins.add(worker)
        segment.uses += 1
        segment.last_used_ns = time.monotonic_ns()
        try:
            await asyncio.shield(segment.opened)
            if segment.error is None:  # otherwise the worker reads it from the control block
                self.feed(segment, feed)
                self._want(segment, segment.needed(stage))
                if checkpoint in self._distrusted:
                    await verified(segment)
        except BaseException:
            self.release(segment, worker)
            raise
        return segment

    async def acquire_all(
        self,
        checkpoints: Sequence[CheckpointId],
        worker: WorkerId,
        stage: Layers | None = None,
        feed: Feed = NO_FEED,
    ) -> list[Segment]:
        """Acquires all checkpoints or none; stage and feed apply to the first. Errors: as of `acquire`."""
        acquired: list[Segment] = []
        try:
            for number, checkpoint in enumerate(checkpoints):
                first = number == 0
                acquired.append(
                    await self.acquire(checkpoint, worker, stage if first else None, feed if first else NO_FEED)
                )
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
        segment.end_growths(Unavailable(f"checkpoint {segment.checkpoint[:12]} is no longer in use here"))
        if segment.fetch is not None:
            segment.fetch.progress.stop_growing()
        self.budget.on_unpinned(segment)

    def pin(self, checkpoint: CheckpointId, holder: WorkerId) -> Segment | None:
        """The segment, pinned by a holder that fetches nothing itself; None if it is not in memory, not yet open, or
        has failed. `release` takes the pin back."""
        segment = self.budget.segments.get(checkpoint)
        if segment is None or segment.error is not None or segment.region is None or segment.fetch is None:
            return None
        segment.pins.add(holder)
        segment.last_used_ns = time.monotonic_ns()
        return segment

    def feed(self, segment: Segment, feed: Feed) -> None:
        """Lets a fetch under way have chunks from peers that it did not know."""
        feed = self._trusted(segment.checkpoint, feed)
        if feed.peers and segment.feed is not None and segment.fetch is not None and not segment.is_complete:
            segment.feed.update(segment.fetch, feed)

    def _trusted(self, checkpoint: CheckpointId, feed: Feed) -> Feed:
        """The feed, unless it is of another checkpoint, or forged chunks of this one have come."""
        return NO_FEED if checkpoint in self._distrusted else feed.of(checkpoint)

    # ── more chunks ────────────────────────────────────────────────────────────────────────────────

    def prioritize(self, segment: Segment, first: int, last: int) -> None:
        """Fetches chunks first to last before all others, because a worker waits for them.

        If there is no memory for them, the segment fails and its worker learns it; chunks already present stay. Where
        several workers use the segment, one must not fail it for all.

        Errors: Unavailable if there is no memory, and other workers use the segment.
        """
        if segment.fetch is None or segment.control is None or segment.error is not None:
            return
        chunks = range(max(0, first), min(last + 1, segment.control.chunk_count))
        try:
            self._want(segment, chunks)
        except FleetError as error:
            if len(segment.pins) > 1:
                raise
            segment.fetch.fail(error)
            return
        segment.fetch.progress.prioritize(chunks)

    async def grow(self, segment: Segment) -> None:
        """Fetches the whole checkpoint in the background and returns when it is present. Throttled, once all requested
        chunks are present; stops when the last caller stops waiting.

        Errors: Unavailable if there is no memory, with the figures; StoreFailed and other errors of the fetch.
        Workers that serve keep serving, and it may be tried again, unless the segment itself has failed.
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
        """Requests chunks. Errors: Unavailable if there is no memory; the segment's own."""
        fetch = segment.require_fetch()
        new = fetch.progress.unwanted(chunks)
        if not new:
            return
        self.budget.grant(segment, new)
        segment.start_filling(time.monotonic_ns())
        fetch.want(new)
        if fetch.progress.is_filled:  # the background reads had fetched the rest
            self._on_filled(segment, None)
        self._changed()

    # ── opening ────────────────────────────────────────────────────────────────────────────────────

    def _open_segment(self, checkpoint: CheckpointId, stage: Layers | None, feed: Feed) -> Segment:
        if not is_digest(checkpoint):
            raise WeightsMissing(f"{checkpoint!r} is not the id of a checkpoint")
        segment = Segment(checkpoint, asyncio.get_running_loop().create_future())
        self.budget.segments[checkpoint] = segment
        task = asyncio.create_task(self._open(segment, stage, feed), name=f"open-{checkpoint[:8]}")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return segment

    async def _open(self, segment: Segment, stage: Layers | None, feed: Feed) -> None:
        """Opens the segment for its first user; the others request their chunks once it is open."""
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
                feed=feed,
                rates=self.bandwidths.bytes_per_s(),
            )
            segment.opened.set_result(None)
            self._changed()
        except asyncio.CancelledError:
            self._fail_open(segment, Unavailable("the node is shutting down", retry_after_s=1.0))
            raise
        except FleetError as error:
            self._fail_open(segment, error)
        except OSError as error:
            self._fail_open(segment, Unavailable(f"checkpoint {checkpoint[:12]}: no memory for it: {error}"))
        except Exception as error:
            log.exception("unexpected error while opening a segment")
            self._fail_open(segment, FleetError(f"checkpoint {checkpoint[:12]}: {type(error).__name__}: {error}"))

    def _fail_open(self, segment: Segment, error: FleetError) -> None:
        segment.error = error
        self.budget.discard(segment)
        segment.filled.set()
        segment.verified.set()
        if not segment.opened.done():
            segment.opened.set_exception(error)
            segment.opened.exception()  # marks it as retrieved, for there may be no waiter

    # ── fetch results ──────────────────────────────────────────────────────────────────────────────

    def _on_filled(self, segment: Segment, error: FleetError | None) -> None:
        """Handles the end of a fetch: all requested chunks are present, or will not come."""
        if segment.fetch is None or segment.error is not None:
            return
        if error is None and (segment.filled.is_set() or not segment.fetch.progress.is_filled):
            return  # reported before, or more was requested meanwhile
        segment.error = error
        segment.stop_filling(time.monotonic_ns())
        self.budget.memory.replenish()
        self._note_traffic(segment)
        extra = {"checkpoint": segment.checkpoint, "size_bytes": segment.size_bytes}
        if error is None:
            log.info(
                "segment ready" if segment.fetch.progress.is_whole else "segment has the chunks of its stages",
                extra=extra,
            )
            self._digests.check(segment)
        else:
            log.warning("segment failed", extra={**extra, "error": error.message})
            self._fail_filled(segment, error)
        self._changed()

    def _fail_filled(self, segment: Segment, error: FleetError) -> None:
        segment.verified.set()
        segment.end_growths(error)
        self.budget.retire(segment)

    def _on_checked(self, segment: Segment, found: CheckedDigests) -> None:
        """Handles the end of a check of digests: a forged segment is evicted, and its workers are stopped."""
        checkpoint = segment.checkpoint
        extra = {"checkpoint": checkpoint, "size_bytes": found.size_bytes, "seconds": round(found.seconds, 3)}
        if segment.error is not None or segment.fetch is None:
            return
        if found.forged is None:
            log.info("digests checked", extra=extra)
            self._distrusted.discard(checkpoint)
            segment.verified.set()
            return
        error = segment.error = forgery_error(checkpoint, found.forged)
        workers = frozenset(segment.pins)
        log.error("forged weights: evicting them, stopping their workers", extra={**extra, "error": error.message})
        self._distrusted.add(checkpoint)
        if self._disk is not None:
            self._disk.drop(checkpoint)
        segment.fetch.fail(error)
        self._fail_filled(segment, error)
        self._reject(workers, error)
        self._changed()

    def _on_grown(self, segment: Segment, error: FleetError | None) -> None:
        """Handles the end of a growth: the whole checkpoint is present, or the growth failed."""
        if error is None:
            log.info("segment whole", extra={"checkpoint": segment.checkpoint, "size_bytes": segment.size_bytes})
            self._digests.check(segment)
        segment.end_growths(error)
        self._changed()

    def _note_traffic(self, segment: Segment) -> None:
        for source, (size_bytes, busy_s) in segment.new_traffic().items():
            self.bandwidths.note(source, size_bytes, busy_s)
        if bytes_per_s := self.bandwidths.bytes_per_s().get(StoreChunks.name):
            self.throttle.set_measured(bytes_per_s)

    # ── shutdown ───────────────────────────────────────────────────────────────────────────────────

    async def close(self) -> None:
        """Stops every fetch within the deadline and releases all memory."""
        for task in list(self._opening):
            task.cancel()
        found = [segment.fetch for segment in self.budget.segments.values() if segment.fetch is not None]
        self.budget.segments.clear()
        for fetch in found:
            if not fetch.progress.is_whole:
                await in_thread(lambda fetch=fetch: fetch.close(CLOSE_TIMEOUT_S), "close-fetch")  # type: ignore[misc]
        self._digests.close()
        if self._disk is not None:
            self._disk.close()
        self.budget.close()


async def verified(segment: Segment) -> None:
    """Waits for the check of a segment's digests. Errors: the segment's own."""
    await segment.filled.wait()
    if segment.error is None and segment.manifest is not None and segment.manifest.digests:
        await segment.verified.wait()
    if segment.error is not None:
        raise segment.error
