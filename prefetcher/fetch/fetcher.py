"""Fetches one checkpoint's chunks into its segment, each verified before workers see it.

The disk and peers have some chunks, the store has all; what several have comes from whoever is expected to finish it
soonest. Each source has threads that take runs of chunks, so that no thread waits for another's share; they end when
there is nothing to take, and new ones start when more is wanted. A corrupt chunk is read once more; after that, and
after a few failures, it passes to another source; a failure in the last one ends the fetch. A peer is given up after
two failures, or one that says that nothing will come. A source takes over a late chunk from another once that has
really stopped: two never write to one place. However a fetch ends, the control block says so, and the workers that wait
on it wake.

Unwanted chunks are left alone until the segment shall grow: then few threads a source fetch them in the background,
once all wanted ones are present, and from the store at a throttled rate. A failure of these ends the growth and
nothing else. `progress` decides what to do next, `segments` which chunks are wanted.
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

from ..sources.base import Piece
from ..sources.errors import ObjectMissing, ObjectSizeMismatch, ReadCancelled, SourceError, SourceLost
from ..sources.throttle import BackgroundThrottle
from .bandwidth import Stopwatch
from .chunk_sources import FetchSource, pieces_in
from .errors import RETRY_DELAYS_S, CorruptChunk, drop_traceback, fetch_error
from .progress import ChunkRun, Exhausted, FetchProgress, Retry
from .pulls import PullPlan

log = logging.getLogger(__name__)


class Fetch:
    """The fetch of one segment.

    `on_filled` is called from some thread whenever all wanted chunks are present, and once with the error if that
    failed: after it no chunk comes. `on_grown` is called when a growth has ended. `on_chunk` gets each chunk that is
    ready, with its source.
    """

    def __init__(
        self,
        *,
        checkpoint: CheckpointId,
        region: native.Region,
        slab_bytes: int,
        control: native.ControlBlock,
        sources: Sequence[FetchSource],
        throttle: BackgroundThrottle,
        on_filled: Callable[[FleetError | None], None],
        on_grown: Callable[[FleetError | None], None] = lambda error: None,
        on_chunk: Callable[[ChunkRange, str], None] = lambda chunk, source: None,
        plan: PullPlan | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._region: native.Region | None = region
        self._slab_bytes = slab_bytes
        self._control = control
        self._sources = list(sources)
        self._stopwatches = [Stopwatch() for _ in sources]
        self._on_filled = on_filled
        self._on_grown = on_grown
        self._on_chunk = on_chunk
        self._throttle = throttle
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.progress = FetchProgress(
            sources, control.chunk_count, plan=plan, background_threads=self._throttle.connections
        )
        self._error: FleetError | None = None
        self._error_reported = False
        self._threads: list[threading.Thread] = []
        self._threads_started = 0

    # ── commands ───────────────────────────────────────────────────────────────────────────────────

    def want(self, chunks: Iterable[int]) -> None:
        """Requests these chunks too. Returns at once: each thread starts the next, because a busy machine takes a
        while to start many."""
        self.progress.want(chunks)
        self._start_threads()

    def add_source(self, source: FetchSource) -> int:
        """One more source for what is yet to come; returns its index."""
        with self._lock:
            self._sources.append(source)
            self._stopwatches.append(Stopwatch())
            index = self.progress.add_source(source)
        self._start_threads()
        return index

    def extend_source(self, index: int, chunks: Sequence[ChunkRange]) -> None:
        """More chunks that a source has."""
        self.progress.extend_source(index, chunks)
        self._start_threads()

    def replan(self, plan: PullPlan) -> None:
        """Another plan of pulls, for what is yet to come."""
        self.progress.replan(plan)
        self._start_threads()

    def grow(self) -> None:
        """Fetches the remaining chunks in the background. Those that failed before are tried again."""
        self.progress.grow()
        self._start_threads()

    def traffic(self) -> dict[str, tuple[int, float]]:
        """Bytes and seconds by source, without background reads."""
        with self._lock:
            measured = list(zip(self._sources, self._stopwatches, strict=True))
        return {source.source.name: (stopwatch.size_bytes, stopwatch.busy_s) for source, stopwatch in measured}

    def fail(self, error: FleetError) -> None:
        """Ends the fetch with an error; the first error counts. No chunk becomes ready after it, so a failed segment
        stays failed."""
        with self._lock:
            if self._error is None and self._control.state == "filling":
                self._error = drop_traceback(error)
                self._control.fail(error.code, error.message)
            self.progress.stop()
            self._stop.set()
            self._region = None  # reads in progress hold their own references
        self._report_error()

    def close(self, timeout_s: float) -> bool:
        """Cancels the fetch and wakes its waiters; True if every thread ended in time.

        A thread stuck in a read ends at the source's own timeout and keeps the memory alive until then.
        """
        self.fail(Unavailable(f"the fetch of checkpoint {self._checkpoint[:12]} was cancelled by its node"))
        deadline = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    # ── threads ────────────────────────────────────────────────────────────────────────────────────

    def _start_threads(self) -> None:
        """Starts a thread for each source that has more work than threads."""
        for index, source in enumerate(list(self._sources)):
            with self._lock:
                if not self.progress.begin_thread(index):
                    continue
                thread = threading.Thread(
                    target=self._run,
                    args=(index,),
                    name=f"{source.source.name}-{self._checkpoint[:8]}-{self._threads_started}",
                    daemon=True,
                )
                self._threads_started += 1
                self._threads = [*(other for other in self._threads if other.is_alive()), thread]
            try:
                thread.start()
            except RuntimeError:  # a limit of the system or of the node's control group
                self.progress.end_thread(index)
                self.fail(Unavailable(f"checkpoint {self._checkpoint[:12]}: the node can start no more threads"))

    def _run(self, source_index: int) -> None:
        counted = True
        try:
            self._start_threads()
            while run := self.progress.next_run(source_index):
                try:
                    self._fetch_run(run)
                finally:
                    self._finish_run(run)
                self._start_threads()
            counted = False
        except FleetError as error:
            self.fail(error)
        except Exception as error:
            log.exception("unexpected error in a fetch")
            self.fail(StoreFailed(f"checkpoint {self._checkpoint[:12]}: {type(error).__name__}: {error}"))
        finally:
            if counted:
                self.progress.end_thread(source_index)
            self._report_error()

    def _finish_run(self, run: ChunkRun) -> None:
        """Accounts for a run, once no reference to its memory is left."""
        event = self.progress.finish_run(run)
        if self.progress.is_whole:
            self._region = None  # a reference to this object keeps no memory
        if event.filled:
            self._on_filled(None)
        if event.grown:
            self._on_grown(None)

    def _report_error(self) -> None:
        """Reports the error, once the last thread has ended."""
        if self.progress.running:
            return
        with self._lock:
            error = None if self._error_reported else self._error
            self._error_reported = self._error_reported or error is not None
        if error is not None:
            self._on_filled(error)

    # ── one run ────────────────────────────────────────────────────────────────────────────────────

    def _fetch_run(self, run: ChunkRun) -> None:
        """Reads and verifies a run chunk by chunk; failed chunks are put back or passed to the next source."""
        source, stopwatch = self._sources[run.source_index].source, self._stopwatches[run.source_index]
        missing = list(run.chunks)
        failed: list[Retry] = []
        done_bytes = 0
        if run.wanted:
            stopwatch.begin()
        throttle, stopped = (None if run.wanted else self._throttle), lambda: self._should_stop(run)
        try:
            pieces = self._pieces(run.chunks)
            with self._throttle.urgent(run.wanted):
                for found in source.read(run.chunks, pieces, stopped, throttle):
                    chunk = missing.pop(0)
                    if found == chunk.checksum:
                        done_bytes += chunk.size_bytes
                        self._ready(chunk, source.name)
                    else:
                        failed.append(self._failed(run.source_index, chunk, CorruptChunk(found)))
        except ReadCancelled:
            pass
        except (SourceError, ObjectMissing, ObjectSizeMismatch) as error:
            if missing:  # an error after the last chunk changes nothing
                failed.append(self._failed(run.source_index, missing.pop(0), error))
        finally:
            if run.wanted:
                stopwatch.end(done_bytes)
            self._put_back(missing, failed)

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
            self.progress.ready(chunk)
        self._on_chunk(chunk, source)

    def _failed(self, source_index: int, chunk: ChunkRange, error: Exception) -> Retry:
        """Decides where and when to retry a chunk. Errors: FleetError if a wanted chunk has no source left."""
        corrupt, spare = isinstance(error, CorruptChunk), self._sources[source_index].spare
        if self.progress.strike(source_index, corrupt=corrupt, lost=isinstance(error, SourceLost)):
            name = self._sources[source_index].source.name
            log.warning("doing without a source", extra={"source": name, "error": str(error)})
        delays_s = {CorruptChunk: (0.0,), SourceError: (0.0,) if spare else RETRY_DELAYS_S}.get(type(error), ())
        outcome = self.progress.failed(source_index, chunk, delays_s)
        if isinstance(outcome, Exhausted):
            if outcome.wanted:  # not bound to a name: a frame that references its own error keeps the segment's memory
                raise fetch_error(self._checkpoint, chunk, error, outcome.tries) from error
            self._end_growth(fetch_error(self._checkpoint, chunk, error, outcome.tries))
            return Retry(source_index, chunk, 0.0)
        source = self._sources[source_index].source.name
        extra = {"chunk": chunk.index, "object": chunk.object, "source": source, "error": str(error)}
        if outcome.source_index == source_index:
            log.warning("a chunk failed, retrying", extra=extra)
        else:
            log.warning("a chunk failed, using the next source", extra=extra)
        return outcome

    def _end_growth(self, error: FleetError) -> None:
        if self.progress.stop_growing():
            log.warning(
                "the growth of a segment failed", extra={"checkpoint": self._checkpoint, "error": error.message}
            )
            self._on_grown(error)

    def _should_stop(self, run: ChunkRun) -> bool:
        """True if this run should stop: the fetch has ended; its chunk is late, and another source is idle; of a
        background run, growth was cancelled, or one of its chunks is wanted now."""
        if run.wanted:
            return self._stop.is_set() or self.progress.gives_up(run)
        return not self.progress.is_growing or self.progress.wants(run.chunks)

    def _put_back(self, missing: list[ChunkRange], failed: list[Retry]) -> None:
        self.progress.put_back(missing)
        self._start_threads()  # other chunks need not wait for the retry delay
        if failed:
            self._stop.wait(max(retry.delay_s for retry in failed))
        self.progress.put_back([retry.chunk for retry in failed])
