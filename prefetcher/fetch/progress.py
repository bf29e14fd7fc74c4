"""Progress of a fetch: which chunks are wanted, present or failed, and which source reads what next.

No bytes: the threads of `fetcher` ask here. A chunk is one thread's at a time, of the source that `allocation` lets
have it. Wanted chunks use all threads of a source; background chunks use few, only while the segment grows and no
wanted chunk is missing. A thread that waits for a chunk much longer than predicted gives it up, if another source has
it and nothing to do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from fleetstart.runtime.contract.weights.manifest import ChunkRange

from .allocation import STRIKES_MAX, Allocation, SourceWork
from .choice import FIRST_FACTOR, PLANNED_PATIENCE_S, is_late, planned_patience_s
from .chunk_sources import FetchSource
from .order import ranges_of
from .pulls import PullPlan

BACKGROUND_RUN_BYTES = 4 * 1024 * 1024
"""Each run begins with a burst, so there should be few; and a chunk that becomes wanted comes with its run, so they
should be short."""


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Consecutive chunks for one thread of a source."""

    source_index: int
    chunks: list[ChunkRange]
    wanted: bool
    """False for background reads."""
    number: int = 0
    """Of the runs of its fetch, each has its own."""


@dataclass(frozen=True, slots=True)
class Retry:
    """The source that retries a failed chunk, and the delay before it."""

    source_index: int
    chunk: ChunkRange
    delay_s: float


@dataclass(frozen=True, slots=True)
class Exhausted:
    """No source can deliver the chunk; `tries` counts those of the last."""

    tries: int
    wanted: bool


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Milestones reached at the end of a run."""

    filled: bool
    """All wanted chunks are present, and were not before."""
    grown: bool
    """The growth is complete."""


class FetchProgress:
    """State of one segment's fetch. Sources go by their index; a chunk that one cannot deliver, another tries.
    Thread-safe."""

    def __init__(
        self,
        sources: Sequence[FetchSource],
        chunk_count: int,
        *,
        plan: PullPlan | None = None,
        background_threads: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`background_threads`: how many threads a source may have for background chunks, now."""
        self._lock = threading.Lock()
        self._clock = clock
        self._background_threads = background_threads
        self._chunk_count = chunk_count
        self._wanted: set[int] = set()
        self._missing: set[int] = set()
        """Wanted chunks that are not present."""
        self._present: set[int] = set()
        self._under_way: dict[int, ChunkRun] = {}
        """Chunks that a thread is fetching, or that wait for a retry."""
        self._moved_s: dict[int, float] = {}
        """By the number of a run of wanted chunks, when it began or its last chunk came."""
        self._runs = 0
        self._reported_filled = 0
        """Number of wanted chunks when `filled` was last reported."""
        self._wanted_runs = 0
        """Runs of wanted chunks in progress."""
        self._growing = False
        self._stopped = False
        self.ready_bytes = 0
        self._allocation = Allocation()
        for source in sources:
            self._allocation.add(source, self._is_free, ())
        if plan is not None:
            self._allocation.replan(plan, self._is_free, ())

    # ── queries ────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_filled(self) -> bool:
        """True if all wanted chunks are present."""
        with self._lock:
            return not self._missing

    @property
    def is_whole(self) -> bool:
        with self._lock:
            return len(self._present) == self._chunk_count

    def has(self, chunks: Collection[int]) -> bool:
        with self._lock:
            return self._present.issuperset(chunks)

    def unwanted(self, chunks: Iterable[int]) -> list[int]:
        """Filters the chunks: those neither wanted nor present."""
        with self._lock:
            return [chunk for chunk in chunks if chunk not in self._wanted and chunk not in self._present]

    def wants(self, chunks: Iterable[ChunkRange]) -> bool:
        """True if one of the chunks is wanted and missing."""
        with self._lock:
            return any(chunk.index in self._missing for chunk in chunks)

    def ranges(self) -> list[tuple[int, int]]:
        """(begin, end) of the chunks present."""
        with self._lock:
            present = sorted(self._present)
        return ranges_of(present)

    def _is_free(self, chunk: int) -> bool:
        return chunk not in self._present and chunk not in self._under_way

    # ── requests ───────────────────────────────────────────────────────────────────────────────────

    def add_source(self, source: FetchSource) -> int:
        """One more source, from now on; returns its index."""
        with self._lock:
            self._allocation.add(source, self._is_free, self._wanted)
            return len(self._works) - 1

    def extend_source(self, index: int, chunks: Sequence[ChunkRange]) -> None:
        """More chunks that a source has."""
        with self._lock:
            self._allocation.extend(index, chunks, self._is_free, self._wanted)

    def replan(self, plan: PullPlan) -> None:
        """Another plan of pulls, for what is yet to come."""
        with self._lock:
            self._allocation.replan(plan, self._is_free, self._missing)
            self._advance()

    def want(self, chunks: Iterable[int]) -> None:
        """Marks chunks as wanted."""
        with self._lock:
            new = [chunk for chunk in chunks if chunk not in self._wanted]
            self._wanted.update(new)
            self._missing.update(chunk for chunk in new if chunk not in self._present)
            self._allocation.want(new)
            self._advance()

    def prioritize(self, chunks: Sequence[int]) -> None:
        """Moves wanted chunks that no thread is fetching to the front."""
        with self._lock:
            self._allocation.prioritize(chunks)

    @property
    def is_growing(self) -> bool:
        return self._growing

    def grow(self) -> None:
        """Allows background reads of all remaining chunks."""
        with self._lock:
            self._growing = not self._stopped

    def stop_growing(self) -> bool:
        """Stops background reads; True if there were any."""
        with self._lock:
            was_growing, self._growing = self._growing, False
            return was_growing

    def stop(self) -> None:
        """Ends the fetch: no thread gets a run any more."""
        with self._lock:
            self._growing = False
            self._stopped = True

    # ── threads and runs ───────────────────────────────────────────────────────────────────────────

    @property
    def _works(self) -> list[SourceWork]:
        return self._allocation.works

    @property
    def running(self) -> int:
        """Number of threads, including those about to start."""
        with self._lock:
            return sum(work.running for work in self._works)

    def begin_thread(self, source_index: int) -> bool:
        """Counts one more thread and returns True, if the source has more work than threads."""
        with self._lock:
            work = self._works[source_index]
            if self._stopped or work.running >= work.threads or work.running >= self._threads_for(source_index):
                return False
            work.running += 1
            return True

    def end_thread(self, source_index: int) -> None:
        with self._lock:
            self._works[source_index].running -= 1

    def next_run(self, source_index: int) -> ChunkRun | None:
        """The next run for a thread of the source. None if there is none: the thread no longer counts."""
        with self._lock:
            work, now_s = self._works[source_index], self._clock()
            if not self._stopped:
                if chunks := self._allocation.take_wanted(source_index, now_s):
                    self._wanted_runs += 1
                    work.under_way_bytes += sum(chunk.size_bytes for chunk in chunks)
                    work.rate.begin(now_s)
                    return self._begun(ChunkRun(source_index, chunks, True, self._runs), now_s)
                if not work.order.pending_bytes and work.background_threads < self._background_threads_for(work):
                    work.background_threads += 1
                    chunks = self._allocation.take_background(source_index, BACKGROUND_RUN_BYTES)
                    return self._begun(ChunkRun(source_index, chunks, False, self._runs), now_s)
            work.running -= 1
            return None

    def _begun(self, run: ChunkRun, now_s: float) -> ChunkRun:
        self._runs += 1
        self._moved_s[run.number] = now_s
        self._under_way.update((chunk.index, run) for chunk in run.chunks)
        return run

    def _threads_for(self, source_index: int) -> int:
        work = self._works[source_index]
        if self._allocation.next_wanted(source_index, self._clock()) is not None:
            return work.threads
        return self._background_threads_for(work) if not work.order.pending_bytes else 0

    def _background_threads_for(self, work: SourceWork) -> int:
        if self._growing and not self._missing and work.order.background_count:
            return min(self._background_threads(), work.threads)
        return 0

    def gives_up(self, run: ChunkRun) -> bool:
        """True if the run's next chunk is so late that another source, which has nothing to do, shall read it."""
        if len(self._works) == 1 or not run.wanted:
            return False
        with self._lock:
            work = self._works[run.source_index]
            chunk = next((chunk.index for chunk in run.chunks if self._under_way.get(chunk.index) is run), None)
            idle = self._idle_others(run.source_index, chunk) if chunk is not None else []
            if chunk is None or not idle:
                return False
            waited_s = self._clock() - self._moved_s[run.number]
            patience_s = self._patience_s(work, idle, self._allocation.is_planned(run.source_index, chunk))
            if not is_late(waited_s, work.under_way_bytes, work.rate.delivered, patience_s):
                return False
            self._allocation.exclude(run.source_index, chunk, late=True)
            self._strike(run.source_index, corrupt=False)
            return True

    def _idle_others(self, source_index: int, chunk: int) -> list[SourceWork]:
        """Other sources that have the chunk, and nothing to do."""
        others = [self._works[other] for other in self._allocation.others(source_index, chunk)]
        return [other for other in others if other.running < other.threads and not other.order.pending_bytes]

    def _patience_s(self, work: SourceWork, idle: Sequence[SourceWork], planned: bool) -> float:
        has_delivered, patience_s = work.rate.has_delivered, work.source.patience_s
        if not planned:
            return patience_s * (1.0 if has_delivered else FIRST_FACTOR)
        now_s = self._clock()
        return planned_patience_s(
            patience_s,
            self._allocation.size_of(self._missing),
            [other.load(now_s) for other in idle],
            has_delivered=has_delivered,
            most_s=PLANNED_PATIENCE_S,
        )

    # ── results ────────────────────────────────────────────────────────────────────────────────────

    def ready(self, chunk: ChunkRange) -> None:
        with self._lock:
            run = self._end_reading(chunk)
            if run is not None:
                self._moved_s[run.number] = now_s = self._clock()
                if run.wanted:
                    self._works[run.source_index].rate.add(chunk.size_bytes, now_s)
                self._works[run.source_index].strikes = 0
            self.ready_bytes += chunk.size_bytes
            self._present.add(chunk.index)
            self._missing.discard(chunk.index)
            self._advance()

    def failed(self, source_index: int, chunk: ChunkRange, delays_s: Sequence[float]) -> Retry | Exhausted:
        """Decides about a failed chunk: as many retries in this source as there are delays, then another source."""
        with self._lock:
            work = self._works[source_index]
            work.failures[chunk.index] += 1
            tries = work.failures[chunk.index]
            if tries <= len(delays_s) and not work.is_dropped:
                return Retry(source_index, chunk, delays_s[tries - 1])
            self._allocation.exclude(source_index, chunk.index)
            if others := self._allocation.others(source_index, chunk.index) or self._allocation.excuse_late(
                chunk.index
            ):
                return Retry(others[0], chunk, 0.0)
            wanted = chunk.index in self._wanted
            if not wanted:  # a later request starts from zero
                self._allocation.forgive(chunk.index)
            return Exhausted(tries, wanted)

    def strike(self, source_index: int, *, corrupt: bool = False, lost: bool = False) -> bool:
        """Counts a failure of a source that the fetch can spare; True if the fetch does without it from now on.
        `lost`: it will deliver nothing more."""
        with self._lock:
            return self._strike(source_index, corrupt=corrupt, lost=lost)

    def _strike(self, source_index: int, *, corrupt: bool, lost: bool = False) -> bool:
        work = self._works[source_index]
        if not work.source.spare or work.is_dropped:
            return False
        work.strikes += 1
        work.corrupt += corrupt
        if not lost and work.strikes < STRIKES_MAX and work.corrupt < STRIKES_MAX:
            return False
        return self._allocation.drop(source_index, self._is_free)

    def put_back(self, chunks: Sequence[ChunkRange]) -> None:
        """Returns chunks that no thread is fetching any more to those that may deliver them."""
        with self._lock:
            for chunk in chunks:
                self._end_reading(chunk)
            self._allocation.put_back(chunk for chunk in chunks if chunk.index not in self._present)
            self._advance()

    def finish_run(self, run: ChunkRun) -> ProgressEvent:
        """Accounts for the end of a run."""
        with self._lock:
            del self._moved_s[run.number]
            work = self._works[run.source_index]
            if run.wanted:
                self._wanted_runs -= 1
                work.rate.end(self._clock())
            else:
                work.background_threads -= 1
            filled = not self._missing and not self._wanted_runs and self._reported_filled < len(self._wanted)
            if filled:
                self._reported_filled = len(self._wanted)
            whole = len(self._present) == self._chunk_count
            grown = self._growing and whole and not any(work.background_threads for work in self._works)
            if grown:
                self._growing = False
            return ProgressEvent(filled, grown)

    def _end_reading(self, chunk: ChunkRange) -> ChunkRun | None:
        run = self._under_way.pop(chunk.index, None)
        if run is not None and run.wanted:
            self._works[run.source_index].under_way_bytes -= chunk.size_bytes
        return run

    def _advance(self) -> None:
        self._allocation.advance(self._missing.__contains__, self._is_free)
