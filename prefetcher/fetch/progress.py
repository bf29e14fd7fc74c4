"""What a fetch has still to do, and which lane does what of it next.

No bytes and no clock: `fetch` has those, and its threads ask here. A lane's chunks come in the order of `order`. What
is wanted comes with all the threads of a lane; the rest only when the segment shall grow, once nothing that is wanted
is missing, and with one.
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
"""A second begins its requests while the first reads: on a link of 200 Mbit/s, a hundredth of all packets of others
waited 13 ms then, with one 4 ms, and it is no faster."""
BACKGROUND_RUN_BYTES = 4 * 1024 * 1024
"""Each begins with a burst, so there should be few; and what somebody wants all at once comes with the run that it is
part of, so they should be short."""


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Chunks that lie one behind the other, for one thread of a lane."""

    source_index: int
    chunks: list[ChunkRange]
    wanted: bool
    """Whether somebody waits for them."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Where a chunk that failed is tried next, and after which time."""

    source_index: int
    chunk: ChunkRange
    delay_s: float


@dataclass(frozen=True, slots=True)
class Exhausted:
    """No lane gives the chunk, after so many tries of the last; and whether somebody waits for it."""

    tries: int
    wanted: bool


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    filled: bool
    """All that is wanted is there, and was not before."""
    grown: bool
    """A growth has all that it was to bring."""


class FetchProgress:
    """Of one segment. Lanes go by their number; a chunk that one cannot give, the next tries. Thread-safe."""

    def __init__(self, sources: Sequence[FetchSource], chunk_count: int) -> None:
        self._lock = threading.Lock()
        self._chunk_count = chunk_count
        self._sources = [_SourceWork(source) for source in sources]
        self._wanted: set[int] = set()
        self._missing: set[int] = set()
        """Of what is wanted."""
        self._present: set[int] = set()
        self._reported_filled = 0
        """How many were wanted when it was told that all of them had come."""
        self._wanted_runs = 0
        """Runs of what is wanted."""
        self._growing = False
        self._stopped = False
        self.ready_bytes = 0

    # ── what there is ──────────────────────────────────────────────────────────────────────────────

    @property
    def is_filled(self) -> bool:
        """Whether all is there that is wanted."""
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
        """Those that nobody has asked for, and that are not there by chance."""
        with self._lock:
            return [chunk for chunk in chunks if chunk not in self._wanted and chunk not in self._present]

    def wants(self, chunks: Iterable[ChunkRange]) -> bool:
        """Whether somebody waits for one of them."""
        with self._lock:
            return any(chunk.index in self._missing for chunk in chunks)

    def ranges(self) -> list[tuple[int, int]]:
        """(begin, end) of the chunks that are there."""
        with self._lock:
            present = sorted(self._present)
        return ranges_of(present)

    # ── what shall be ──────────────────────────────────────────────────────────────────────────────

    def want(self, chunks: Iterable[int]) -> None:
        """These too."""
        with self._lock:
            new = [chunk for chunk in chunks if chunk not in self._wanted]
            self._wanted.update(new)
            self._missing.update(chunk for chunk in new if chunk not in self._present)
            for work in self._sources:
                work.order.want(new)

    def prioritize(self, chunks: Sequence[int]) -> None:
        """These before all others, of those that are wanted and that nobody fetches yet."""
        with self._lock:
            for work in self._sources:
                work.order.prioritize(chunks)

    @property
    def is_growing(self) -> bool:
        return self._growing

    def grow(self) -> None:
        """The rest too."""
        with self._lock:
            self._growing = not self._stopped

    def stop_growing(self) -> bool:
        """Whether it grew."""
        with self._lock:
            was_growing, self._growing = self._growing, False
            return was_growing

    def stop(self) -> None:
        """There is nothing to do any more."""
        with self._lock:
            self._growing = False
            self._stopped = True

    # ── who does what ──────────────────────────────────────────────────────────────────────────────

    @property
    def running(self) -> int:
        """Threads, those included that are about to begin."""
        with self._lock:
            return sum(work.running for work in self._sources)

    def begin_thread(self, source_index: int) -> bool:
        """Whether the lane has more to do than threads; then one more counts."""
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
        """What a thread of the lane takes next. None if there is nothing to do: then the thread no longer counts."""
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

    # ── what became of it ──────────────────────────────────────────────────────────────────────────

    def ready(self, chunk: ChunkRange) -> None:
        with self._lock:
            self.ready_bytes += chunk.size_bytes
            self._present.add(chunk.index)
            self._missing.discard(chunk.index)

    def failed(self, source_index: int, chunk: ChunkRange, delays_s: Sequence[float]) -> Retry | Exhausted:
        """Tried as many times more in this lane as there are delays, then by the one below."""
        with self._lock:
            failures = self._sources[source_index].failures
            failures[chunk.index] += 1
            tries = failures[chunk.index]
            if tries <= len(delays_s):
                return Retry(source_index, chunk, delays_s[tries - 1])
            if source_index + 1 < len(self._sources):
                return Retry(source_index + 1, chunk, 0.0)
            wanted = chunk.index in self._wanted
            if not wanted:  # whoever wants it later, tries anew
                del failures[chunk.index]
            return Exhausted(tries, wanted)

    def put_back(self, source_index: int, chunks: Iterable[ChunkRange]) -> None:
        """Nobody fetches them any more."""
        with self._lock:
            self._sources[source_index].order.put_back(chunks)

    def finish_run(self, run: ChunkRun) -> ProgressEvent:
        """Nothing more comes of the run."""
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
    def __init__(self, source: FetchSource) -> None:
        self.threads = source.threads
        self.run_bytes = source.source.run_bytes
        self.order = FetchOrder(source.chunks)
        self.running = 0
        self.background_threads = 0
        """Of the running threads those that fetch what nobody wants."""
        self.failures: Counter[int] = Counter()
