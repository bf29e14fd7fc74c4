"""Progress of a fetch: which chunks are wanted, present or failed, and which source reads what next.

No bytes and no clock: the threads of `fetcher` ask here. A source's chunks come in the order of `order`. Wanted
chunks use all threads of a source; background chunks use one, only while the segment grows and no wanted chunk is
missing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from fleetstart.runtime.contract.weights.manifest import ChunkRange

from .chunk_sources import FetchSource
from .order import FetchOrder, ranges_of, run_length

BACKGROUND_THREADS = 1
"""With two, the second begins its requests while the first reads: on a link of 200 Mbit/s, one in a hundred packets
of other connections waited 13 ms then, with one thread 4 ms, and it is no faster."""
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
    """State of one segment's fetch. Sources go by their index; a chunk that one cannot deliver, the next tries.
    Thread-safe."""

    def __init__(self, sources: Sequence[FetchSource], chunk_count: int) -> None:
        self._lock = threading.Lock()
        self._chunk_count = chunk_count
        self._sources = [_SourceWork(source) for source in sources]
        self._wanted: set[int] = set()
        self._missing: set[int] = set()
        """Wanted chunks that are not present."""
        self._present: set[int] = set()
        self._reported_filled = 0
        """Number of wanted chunks when `filled` was last reported."""
        self._wanted_runs = 0
        """Runs of wanted chunks in progress."""
        self._growing = False
        self._stopped = False
        self.ready_bytes = 0

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

    # ── requests ───────────────────────────────────────────────────────────────────────────────────

    def want(self, chunks: Iterable[int]) -> None:
        """Marks chunks as wanted."""
        with self._lock:
            new = [chunk for chunk in chunks if chunk not in self._wanted]
            self._wanted.update(new)
            self._missing.update(chunk for chunk in new if chunk not in self._present)
            for work in self._sources:
                work.order.want(new)

    def prioritize(self, chunks: Sequence[int]) -> None:
        """Moves wanted chunks that no thread is fetching to the front."""
        with self._lock:
            for work in self._sources:
                work.order.prioritize(chunks)

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
    def running(self) -> int:
        """Number of threads, including those about to start."""
        with self._lock:
            return sum(work.running for work in self._sources)

    def begin_thread(self, source_index: int) -> bool:
        """Counts one more thread and returns True, if the source has more work than threads."""
        with self._lock:
            work = self._sources[source_index]
            if self._stopped or work.running >= self._threads_for(work):
                return False
            work.running += 1
            return True

    def end_thread(self, source_index: int) -> None:
        with self._lock:
            self._sources[source_index].running -= 1

    def next_run(self, source_index: int) -> ChunkRun | None:
        """The next run for a thread of the source. None if there is none: the thread no longer counts."""
        with self._lock:
            work = self._sources[source_index]
            if not self._stopped:
                if pending_bytes := work.order.pending_bytes:
                    self._wanted_runs += 1
                    most_bytes = run_length(work.run_bytes, pending_bytes, work.threads)
                    return ChunkRun(source_index, work.order.next_run(most_bytes), wanted=True)
                if work.background_threads < self._threads_for(work):
                    work.background_threads += 1
                    most_bytes = min(BACKGROUND_RUN_BYTES, work.run_bytes)
                    return ChunkRun(source_index, work.order.next_background_run(most_bytes), wanted=False)
            work.running -= 1
            return None

    def _threads_for(self, work: _SourceWork) -> int:
        if work.order.pending_bytes:
            return work.threads
        if self._growing and not self._missing and work.order.background_count:
            return min(BACKGROUND_THREADS, work.threads)
        return 0

    # ── results ────────────────────────────────────────────────────────────────────────────────────

    def ready(self, chunk: ChunkRange) -> None:
        with self._lock:
            self.ready_bytes += chunk.size_bytes
            self._present.add(chunk.index)
            self._missing.discard(chunk.index)

    def failed(self, source_index: int, chunk: ChunkRange, delays_s: Sequence[float]) -> Retry | Exhausted:
        """Decides about a failed chunk: as many retries in this source as there are delays, then the next source."""
        with self._lock:
            failures = self._sources[source_index].failures
            failures[chunk.index] += 1
            tries = failures[chunk.index]
            if tries <= len(delays_s):
                return Retry(source_index, chunk, delays_s[tries - 1])
            if source_index + 1 < len(self._sources):
                return Retry(source_index + 1, chunk, 0.0)
            wanted = chunk.index in self._wanted
            if not wanted:  # a later request starts from zero
                del failures[chunk.index]
            return Exhausted(tries, wanted)

    def put_back(self, source_index: int, chunks: Iterable[ChunkRange]) -> None:
        """Returns chunks to the source's order: no thread is fetching them."""
        with self._lock:
            self._sources[source_index].order.put_back(chunks)

    def finish_run(self, run: ChunkRun) -> ProgressEvent:
        """Accounts for the end of a run."""
        with self._lock:
            if run.wanted:
                self._wanted_runs -= 1
            else:
                self._sources[run.source_index].background_threads -= 1
            filled = not self._missing and not self._wanted_runs and self._reported_filled < len(self._wanted)
            if filled:
                self._reported_filled = len(self._wanted)
            whole = len(self._present) == self._chunk_count
            grown = self._growing and whole and not any(work.background_threads for work in self._sources)
            if grown:
                self._growing = False
            return ProgressEvent(filled, grown)


class _SourceWork:
    """Work of one source."""

    def __init__(self, source: FetchSource) -> None:
        self.threads = source.threads
        self.run_bytes = source.source.run_bytes
        self.order = FetchOrder(source.chunks)
        self.running = 0
        self.background_threads = 0
        """Threads that fetch background chunks."""
        self.failures: Counter[int] = Counter()
