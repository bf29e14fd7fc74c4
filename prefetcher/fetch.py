"""Brings one checkpoint's chunks into its segment, each verified before anybody sees it.

Sources are lanes: the disk has some chunks, the store has all. Each lane's threads take runs of chunks from its
order, so that no thread waits for another's share; they end when there is nothing to take, and others begin when
more is wanted. A chunk that does not check is read once more; after that, and after a few failures, a lane's chunk
goes to the lane below, and the last lane's ends the fetch. However it ends, the control block says so, and whoever
waits on it wakes.

Chunks that nobody wants are left alone, until the segment shall grow: then one thread a lane fetches them, once all
that is wanted is there, and in the store's lane at a pace that others on the link do not feel. What they cannot get
ends the growth and nothing else: nobody waits for it. Which chunks exist is the manifest's affair, which are wanted
and what becomes of the segment that of `segments`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from fleetstart import native
from fleetstart.prefetcher.bandwidth import Stopwatch
from fleetstart.prefetcher.fetch_errors import Damaged, explained, store_failed, without_frames
from fleetstart.prefetcher.lanes import Lane, pieces_in
from fleetstart.prefetcher.order import FetchOrder, ranges_of, run_length
from fleetstart.prefetcher.pace import Pace
from fleetstart.prefetcher.sources import Abandoned, ObjectMissing, ObjectSize, Piece, Source, SourceError
from fleetstart.runtime.contract.errors import CheckpointInvalid, FleetError, StoreFailed, Unavailable, WeightsMissing
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.manifest import MANIFEST_MAX_BYTES, MANIFEST_OBJECT, ChunkRange, checkpoint_key

log = logging.getLogger(__name__)

RETRY_DELAYS_S = (0.1, 0.3, 1.0)
"""Between tries of one read: a store that is restarted is back within them, a dead one holds nobody for long."""
GROWING_THREADS = 1
"""A second begins its requests while the first reads: on a link of 200 Mbit/s, a hundredth of all packets of others
waited 13 ms then, with one 4 ms, and it is no faster."""
GROWING_RUN_BYTES = 4 * 1024 * 1024
"""Each begins with a burst, so there should be few; and what somebody wants all at once comes with the run that it is
part of, so they should be short."""


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


def with_retries(read: Callable[[], bytes], what: str) -> bytes:
    for delay_s in RETRY_DELAYS_S:
        try:
            return read()
        except SourceError as error:
            log.warning("store did not answer, trying again", extra={"what": what, "error": str(error)})
            time.sleep(delay_s)
    try:
        return read()
    except SourceError as error:
        raise store_failed(what, error, len(RETRY_DELAYS_S) + 1) from error


class _Traffic:
    """One lane under way; guarded by the fetch's lock."""

    def __init__(self, level: int, lane: Lane) -> None:
        self.level = level
        self.source = lane.source
        self.threads = lane.threads
        self.order = FetchOrder(lane.chunks)
        self.running = 0
        """Threads, those included that are about to begin."""
        self.growing = 0
        """Of them those that fetch what nobody wants."""
        self.failures: Counter[int] = Counter()
        self.stopwatch = Stopwatch()


@dataclass(frozen=True, slots=True)
class _Run:
    chunks: list[ChunkRange]
    wanted: bool


@dataclass(frozen=True, slots=True)
class _Again:
    traffic: _Traffic
    chunk: ChunkRange
    delay_s: float


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
        lanes: Sequence[Lane],
        on_filled: Callable[[FleetError | None], None],
        on_grown: Callable[[FleetError | None], None] = lambda error: None,
        on_chunk: Callable[[ChunkRange, str], None] = lambda chunk, source: None,
        pace: Pace | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._region: native.Region | None = region
        self._slab_bytes = slab_bytes
        self._control = control
        self._on_filled = on_filled
        self._on_grown = on_grown
        self._on_chunk = on_chunk
        self._pace = pace
        self._traffic = [_Traffic(level, lane) for level, lane in enumerate(lanes)]
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._error: FleetError | None = None
        self._told_end = False
        self._told_filled = 0
        """How many were wanted when it was told that all of them had come."""
        self._wanted: set[int] = set()
        self._missing: set[int] = set()
        """Of what is wanted."""
        self._there: set[int] = set()
        self._growing = False
        self._threads: list[threading.Thread] = []
        self._begun = 0
        self._running = 0
        self._under_way = 0
        """Runs of what is wanted."""
        self.ready_bytes = 0

    # ── what others ask of it ──────────────────────────────────────────────────────────────────────

    def want(self, chunks: Iterable[int]) -> None:
        """These too, as fast as they come. Returns at once: each thread starts the next, because a busy machine
        takes a while to begin many."""
        with self._lock:
            new = [chunk for chunk in chunks if chunk not in self._wanted]
            self._wanted.update(new)
            self._missing.update(chunk for chunk in new if chunk not in self._there)
            for traffic in self._traffic:
                traffic.order.want(new)
        self._staff()

    def unwanted(self, chunks: Iterable[int]) -> list[int]:
        """Those that nobody has asked for, and that are not there by chance."""
        with self._lock:
            return [chunk for chunk in chunks if chunk not in self._wanted and chunk not in self._there]

    def first(self, chunks: Iterable[int]) -> None:
        """These before all others, of those that are wanted and that nobody fetches yet."""
        wanted = list(chunks)
        with self._lock:
            for traffic in self._traffic:
                traffic.order.first(wanted)

    def grow(self) -> None:
        """The rest too, behind everybody's back. What failed before is tried again."""
        with self._lock:
            self._growing = not self._stop.is_set()
        self._staff()

    def stop_growing(self) -> None:
        """What is under way is abandoned, unless somebody wants it meanwhile."""
        with self._lock:
            self._growing = False

    @property
    def is_filled(self) -> bool:
        with self._lock:
            return not self._missing

    @property
    def is_whole(self) -> bool:
        with self._lock:
            return len(self._there) == self._control.chunk_count

    def has(self, chunks: Collection[int]) -> bool:
        with self._lock:
            return self._there.issuperset(chunks)

    def ranges(self) -> list[tuple[int, int]]:
        """(begin, end) of the chunks that are there."""
        with self._lock:
            there = sorted(self._there)
        return ranges_of(there)

    def traffic(self) -> dict[str, tuple[int, float]]:
        """Bytes that each source gave to those who waited, and the seconds that it took."""
        return {
            traffic.source.name: (traffic.stopwatch.size_bytes, traffic.stopwatch.busy_s) for traffic in self._traffic
        }

    def fail(self, error: FleetError) -> None:
        """What is wanted cannot come. The first error counts.

        Nothing becomes ready after it, so a failed segment stays failed.
        """
        with self._lock:
            if self._error is None and self._control.state == "filling":
                self._error = without_frames(error)
                self._control.fail(error.code, error.message)
            self._growing = False
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
        for traffic in self._traffic:
            with self._lock:
                if self._stop.is_set() or traffic.running >= self._threads_for(traffic):
                    continue
                traffic.running += 1
                self._running += 1
                thread = threading.Thread(
                    target=self._run,
                    args=(traffic,),
                    name=f"{traffic.source.name}-{self._checkpoint[:8]}-{self._begun}",
                    daemon=True,
                )
                self._begun += 1
                self._threads = [*(other for other in self._threads if other.is_alive()), thread]
            try:
                thread.start()
            except RuntimeError:  # a limit of the system or of the node's group
                self._leave(traffic)
                self.fail(Unavailable(f"checkpoint {self._checkpoint[:12]}: the node can start no more threads"))

    def _threads_for(self, traffic: _Traffic) -> int:
        if traffic.order.pending_bytes:
            return traffic.threads
        if self._growing and not self._missing and traffic.order.rest:
            return min(GROWING_THREADS, traffic.threads)
        return 0

    def _run(self, traffic: _Traffic) -> None:
        counted = True
        try:
            self._staff()
            while run := self._next_run(traffic):
                try:
                    self._take(traffic, run)
                finally:
                    self._took(traffic, run)
                self._staff()
            counted = False
        except FleetError as error:
            self.fail(error)
        except Exception as error:
            log.exception("fetch failed in an unforeseen way")
            self.fail(StoreFailed(f"checkpoint {self._checkpoint[:12]}: {type(error).__name__}: {error}"))
        finally:
            if counted:
                self._leave(traffic)
            self._tell_end()

    def _next_run(self, traffic: _Traffic) -> _Run | None:
        """None if there is nothing to do: then this thread no longer counts."""
        with self._lock:
            if not self._stop.is_set():
                order = traffic.order
                if order.pending_bytes:
                    most_bytes = run_length(traffic.source.run_bytes, order.pending_bytes, traffic.threads)
                    self._under_way += 1
                    return _Run(order.next_run(most_bytes), wanted=True)
                if traffic.growing < self._threads_for(traffic):
                    traffic.growing += 1
                    most_bytes = min(GROWING_RUN_BYTES, traffic.source.run_bytes)
                    return _Run(order.next_of_rest(most_bytes), wanted=False)
            self._uncount(traffic)
            return None

    def _took(self, traffic: _Traffic, run: _Run) -> None:
        """Nothing of the run holds memory any more."""
        with self._lock:
            if run.wanted:
                self._under_way -= 1
            else:
                traffic.growing -= 1
            filled = not self._missing and not self._under_way and self._told_filled < len(self._wanted)
            if filled:
                self._told_filled = len(self._wanted)
            whole = len(self._there) == self._control.chunk_count
            if whole:  # whoever keeps this for its figures keeps no memory
                self._region = None
            grown = self._growing and whole and not any(other.growing for other in self._traffic)
            if grown:
                self._growing = False
        if filled:
            self._on_filled(None)
        if grown:
            self._on_grown(None)

    def _leave(self, traffic: _Traffic) -> None:
        with self._lock:
            self._uncount(traffic)

    def _uncount(self, traffic: _Traffic) -> None:
        traffic.running -= 1
        self._running -= 1

    def _tell_end(self) -> None:
        """Of an error, once the last thread has ended."""
        with self._lock:
            if self._running:
                return
            error = None if self._told_end else self._error
            self._told_end = self._told_end or error is not None
        if error is not None:
            self._on_filled(error)

    def _take(self, traffic: _Traffic, run: _Run) -> None:
        """One run, verified chunk by chunk; what failed of it is put back, or passed to the lane below."""
        missing = list(run.chunks)
        failed: list[_Again] = []
        done_bytes = 0
        if run.wanted:
            traffic.stopwatch.begin()
        try:
            pieces = self._pieces(run.chunks)
            pace, stopped = (None, self._stop.is_set) if run.wanted else (self._pace, lambda: not self._growing)
            for found in traffic.source.read(run.chunks, pieces, stopped, pace):
                chunk = missing.pop(0)
                if found == chunk.checksum:
                    done_bytes += chunk.size_bytes
                    self._ready(chunk, traffic.source.name)
                else:
                    failed.append(self._failed(traffic, chunk, Damaged(found)))
        except Abandoned:
            pass
        except (SourceError, ObjectMissing, ObjectSize) as error:
            if missing:  # a source that stumbles over its own end has given all the same
                failed.append(self._failed(traffic, missing.pop(0), error))
        finally:
            if run.wanted:
                traffic.stopwatch.end(done_bytes)
            with self._lock:
                traffic.order.put_back(missing)
            self._staff()  # others need not wait as long as what failed
            if failed:
                self._stop.wait(max(again.delay_s for again in failed))
            with self._lock:
                for again in failed:
                    again.traffic.order.put_back([again.chunk])

    def _pieces(self, chunks: list[ChunkRange]) -> list[Piece]:
        region = self._region
        if region is None:
            raise Abandoned(chunks[0].object)
        try:
            return pieces_in(region, self._slab_bytes, chunks)
        except OSError as error:
            raise Unavailable(f"no memory for chunk {chunks[0].index} of {self._checkpoint[:12]}: {error}") from error

    def _ready(self, chunk: ChunkRange, source: str) -> None:
        with self._lock:
            if self._error is not None or not self._control.mark_ready(chunk.index):
                return
            self.ready_bytes += chunk.size_bytes
            self._there.add(chunk.index)
            self._missing.discard(chunk.index)
        self._on_chunk(chunk, source)

    def _failed(self, traffic: _Traffic, chunk: ChunkRange, error: Exception) -> _Again:
        """Where and when to try again. Errors: what the waiters are told, if there is no such place."""
        with self._lock:
            traffic.failures[chunk.index] += 1
            failures = traffic.failures[chunk.index]
            wanted = chunk.index in self._wanted
        delays_s = {Damaged: (0.0,), SourceError: RETRY_DELAYS_S}.get(type(error), ())
        extra = {"chunk": chunk.index, "object": chunk.object, "source": traffic.source.name, "error": str(error)}
        if failures <= len(delays_s):
            log.warning("a chunk failed, trying again", extra=extra)
            return _Again(traffic, chunk, delays_s[failures - 1])
        if traffic.level + 1 < len(self._traffic):
            log.warning("a chunk failed, taking it from elsewhere", extra=extra)
            return _Again(self._traffic[traffic.level + 1], chunk, 0.0)
        if wanted:
            raise explained(self._checkpoint, chunk, error, failures) from error
        self._end_growth(traffic, chunk, explained(self._checkpoint, chunk, error, failures))
        return _Again(traffic, chunk, 0.0)

    def _end_growth(self, traffic: _Traffic, chunk: ChunkRange, error: FleetError) -> None:
        """Nobody waits for the chunk; whoever wants it later, tries anew."""
        with self._lock:
            del traffic.failures[chunk.index]
            was_growing, self._growing = self._growing, False
        if was_growing:
            log.warning("a segment grows no further", extra={"checkpoint": self._checkpoint, "error": error.message})
            self._on_grown(error)
