"""Brings one checkpoint's chunks into its segment, each verified before anybody sees it.

Sources are lanes: the disk has some chunks, the store has all. Each lane's threads take runs of chunks from its
order, so that no thread waits for another's share; they end when there is nothing to take, and others begin when
more is wanted. A chunk that does not check is read once more; after that, and after a few failures, a lane's chunk
goes to the lane below, and the last lane's ends the fetch. However it ends, the control block says so, and whoever
waits on it wakes.

Chunks that nobody wants are left alone, until the segment shall grow: then one thread a lane fetches them, once all
that is wanted is there, and in the store's lane at a pace that others on the link do not feel. What they cannot get
ends the growth and nothing else: nobody waits for it. What comes next decides `filling`, which chunks exist the
manifest, which are wanted and what becomes of the segment `segments`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from fleetstart import native
from fleetstart.runtime.contract.errors import FleetError, StoreFailed, Unavailable
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.weights.manifest import ChunkRange

from ..sources.base import ObjectMissing, ObjectSizeMismatch, Piece, ReadCancelled, SourceError
from ..sources.throttle import BackgroundThrottle
from .bandwidth import Stopwatch
from .chunk_sources import FetchSource, pieces_in
from .errors import RETRY_DELAYS_S, CorruptChunk, drop_traceback, fetch_error
from .progress import ChunkRun, Exhausted, FetchProgress, Retry

log = logging.getLogger(__name__)


class Fetch:
    """The filling of one segment, of what is wanted of it at first, and of more later.

    `on_filled` is called from some thread whenever all that is wanted has come, and once with the error if that
    failed: then nothing comes any more. `on_grown` is called when a growth has ended. `on_chunk` is told of each
    chunk that is ready, and of which source it came.
    """

    def __init__(
        self,
        *,
        checkpoint: CheckpointId,
        region: native.Region,
        slab_bytes: int,
        control: native.ControlBlock,
        lanes: Sequence[FetchSource],
        pace: BackgroundThrottle,
        on_filled: Callable[[FleetError | None], None],
        on_grown: Callable[[FleetError | None], None] = lambda error: None,
        on_chunk: Callable[[ChunkRange, str], None] = lambda chunk, source: None,
    ) -> None:
        self._checkpoint = checkpoint
        self._region: native.Region | None = region
        self._slab_bytes = slab_bytes
        self._control = control
        self._lanes = list(lanes)
        self._stopwatches = [Stopwatch() for _ in lanes]
        self._on_filled = on_filled
        self._on_grown = on_grown
        self._on_chunk = on_chunk
        self._pace = pace
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.filling = FetchProgress(lanes, control.chunk_count)
        self._error: FleetError | None = None
        self._told_end = False
        self._threads: list[threading.Thread] = []
        self._begun = 0

    # ── what others ask of it ──────────────────────────────────────────────────────────────────────

    def want(self, chunks: Iterable[int]) -> None:
        """These too, as fast as they come. Returns at once: each thread starts the next, because a busy machine
        takes a while to begin many."""
        self.filling.want(chunks)
        self._staff()

    def grow(self) -> None:
        """The rest too, behind everybody's back. What failed before is tried again."""
        self.filling.grow()
        self._staff()

    def traffic(self) -> dict[str, tuple[int, float]]:
        """Bytes that each source gave to those who waited, and the seconds that it took."""
        return {
            lane.source.name: (stopwatch.size_bytes, stopwatch.busy_s)
            for lane, stopwatch in zip(self._lanes, self._stopwatches, strict=True)
        }

    def fail(self, error: FleetError) -> None:
        """What is wanted cannot come. The first error counts.

        Nothing becomes ready after it, so a failed segment stays failed.
        """
        with self._lock:
            if self._error is None and self._control.state == "filling":
                self._error = drop_traceback(error)
                self._control.fail(error.code, error.message)
            self.filling.stop()
            self._stop.set()
            self._region = None  # what a read under way has of it, it has itself
        self._tell_end()

    def close(self, timeout_s: float) -> bool:
        """Abandons what is not there yet and wakes who waits for it; True if every thread ended in time.

        A thread stuck in a read ends at the source's own timeout and keeps the memory alive until then.
        """
        self.fail(Unavailable(f"the fetch of checkpoint {self._checkpoint[:12]} was abandoned by its node"))
        deadline = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    # ── its threads ────────────────────────────────────────────────────────────────────────────────

    def _staff(self) -> None:
        """Starts a thread in each lane that has more to do than threads."""
        for number, lane in enumerate(self._lanes):
            with self._lock:
                if not self.filling.begin_thread(number):
                    continue
                thread = threading.Thread(
                    target=self._run,
                    args=(number,),
                    name=f"{lane.source.name}-{self._checkpoint[:8]}-{self._begun}",
                    daemon=True,
                )
                self._begun += 1
                self._threads = [*(other for other in self._threads if other.is_alive()), thread]
            try:
                thread.start()
            except RuntimeError:  # a limit of the system or of the node's group
                self.filling.end_thread(number)
                self.fail(Unavailable(f"checkpoint {self._checkpoint[:12]}: the node can start no more threads"))

    def _run(self, lane: int) -> None:
        counted = True
        try:
            self._staff()
            while run := self.filling.next_run(lane):
                try:
                    self._take(run)
                finally:
                    self._took(run)
                self._staff()
            counted = False
        except FleetError as error:
            self.fail(error)
        except Exception as error:
            log.exception("fetch failed in an unforeseen way")
            self.fail(StoreFailed(f"checkpoint {self._checkpoint[:12]}: {type(error).__name__}: {error}"))
        finally:
            if counted:
                self.filling.end_thread(lane)
            self._tell_end()

    def _took(self, run: ChunkRun) -> None:
        """Nothing of the run holds memory any more."""
        news = self.filling.took(run)
        if self.filling.is_whole:
            self._region = None  # whoever keeps this for its figures keeps no memory
        if news.filled:
            self._on_filled(None)
        if news.grown:
            self._on_grown(None)

    def _tell_end(self) -> None:
        """Of an error, once the last thread has ended."""
        if self.filling.running:
            return
        with self._lock:
            error = None if self._told_end else self._error
            self._told_end = self._told_end or error is not None
        if error is not None:
            self._on_filled(error)

    # ── a run ──────────────────────────────────────────────────────────────────────────────────────

    def _take(self, run: ChunkRun) -> None:
        """Verified chunk by chunk; what failed of it is put back, or passed to the lane below."""
        source, stopwatch = self._lanes[run.lane].source, self._stopwatches[run.lane]
        missing = list(run.chunks)
        failed: list[Retry] = []
        done_bytes = 0
        if run.wanted:
            stopwatch.begin()
        pace, stopped = (None, self._stop.is_set) if run.wanted else (self._pace, lambda: self._is_moot(run))
        try:
            pieces = self._pieces(run.chunks)
            with self._pace.urgent(run.wanted):
                for found in source.read(run.chunks, pieces, stopped, pace):
                    chunk = missing.pop(0)
                    if found == chunk.checksum:
                        done_bytes += chunk.size_bytes
                        self._ready(chunk, source.name)
                    else:
                        failed.append(self._failed(run.lane, chunk, CorruptChunk(found)))
        except ReadCancelled:
            pass
        except (SourceError, ObjectMissing, ObjectSizeMismatch) as error:
            if missing:  # a source that stumbles over its own end has given all the same
                failed.append(self._failed(run.lane, missing.pop(0), error))
        finally:
            if run.wanted:
                stopwatch.end(done_bytes)
            self._put_back(run.lane, missing, failed)

    def _pieces(self, chunks: list[ChunkRange]) -> list[Piece]:
        region = self._region
        if region is None:
            raise ReadCancelled(chunks[0].object)
        try:
            return pieces_in(region, self._slab_bytes, chunks)
        except OSError as error:
            raise Unavailable(f"no memory for chunk {chunks[0].index} of {self._checkpoint[:12]}: {error}") from error

    def _ready(self, chunk: ChunkRange, source: str) -> None:
        with self._lock:
            if self._error is not None or not self._control.mark_ready(chunk.index):
                return
            self.filling.ready(chunk)
        self._on_chunk(chunk, source)

    def _failed(self, lane: int, chunk: ChunkRange, error: Exception) -> Retry:
        """Where and when to try again. Errors: what the waiters are told, if there is no such place."""
        delays_s = {CorruptChunk: (0.0,), SourceError: RETRY_DELAYS_S}.get(type(error), ())
        outcome = self.filling.failed(lane, chunk, delays_s)
        if isinstance(outcome, Exhausted):
            if outcome.wanted:  # no name for it here: an error that its own frame knows keeps the segment's memory
                raise fetch_error(self._checkpoint, chunk, error, outcome.tries) from error
            self._end_growth(fetch_error(self._checkpoint, chunk, error, outcome.tries))
            return Retry(lane, chunk, 0.0)
        source = self._lanes[lane].source.name
        extra = {"chunk": chunk.index, "object": chunk.object, "source": source, "error": str(error)}
        if outcome.lane == lane:
            log.warning("a chunk failed, trying again", extra=extra)
        else:
            log.warning("a chunk failed, taking it from elsewhere", extra=extra)
        return outcome

    def _end_growth(self, error: FleetError) -> None:
        if self.filling.stop_growing():
            log.warning("a segment grows no further", extra={"checkpoint": self._checkpoint, "error": error.message})
            self._on_grown(error)

    def _is_moot(self, run: ChunkRun) -> bool:
        """Whether what streams in behind everybody's back shall do so no longer, or somebody waits for it now."""
        return not self.filling.is_growing or self.filling.wants(run.chunks)

    def _put_back(self, lane: int, missing: list[ChunkRange], failed: list[Retry]) -> None:
        self.filling.put_back(lane, missing)
        self._staff()  # others need not wait as long as what failed
        if failed:
            self._stop.wait(max(again.delay_s for again in failed))
        for again in failed:
            self.filling.put_back(again.lane, [again.chunk])
