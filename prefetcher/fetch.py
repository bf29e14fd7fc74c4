"""Brings one checkpoint's chunks into its segment, each verified before anybody sees it.

Sources are lanes: the disk has some chunks, the store has all. Each lane's threads take runs of chunks from its
order, so that no thread waits for another's share. A chunk that does not check is read once more; after that,
and after a few failures, a lane's chunk goes to the lane below, and the last lane's ends the fetch. However it
ends, the control block says so, and whoever waits on it wakes. Which chunks exist is the manifest's affair, what
becomes of the segment that of `segments`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fleetstart import native
from fleetstart.prefetcher.bandwidth import Stopwatch
from fleetstart.prefetcher.order import FetchOrder, run_length
from fleetstart.prefetcher.sources import (
    PAGE_BYTES,
    Abandoned,
    ObjectMissing,
    ObjectSize,
    Piece,
    Range,
    Source,
    SourceError,
)
from fleetstart.runtime.contract.errors import (
    CheckpointInvalid,
    ChecksumMismatch,
    FleetError,
    StoreFailed,
    Unavailable,
    WeightsMissing,
)
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.manifest import (
    MANIFEST_MAX_BYTES,
    MANIFEST_OBJECT,
    ChunkRange,
    Manifest,
    checkpoint_key,
)

log = logging.getLogger(__name__)

RETRY_DELAYS_S = (0.1, 0.3, 1.0)
"""Between tries of one read: a store that is restarted is back within them, a dead one holds nobody for long."""

UPLOAD_AGAIN = "upload the weights again: fs deploy"


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
        raise store_failed(what, error) from error


def store_failed(what: str, error: SourceError) -> StoreFailed:
    return StoreFailed(
        f"{what}: the store failed {len(RETRY_DELAYS_S) + 1} times, last with: {error}",
        hint="check that the object store is up and that the node may read it",
    )


class ChunkSource(Protocol):
    """Chunks of one checkpoint. Thread-safe. Errors: as of `Source.read`."""

    name: str
    run_chunks: int

    def read(self, run: Sequence[ChunkRange], pieces: Sequence[Piece], stopped: Callable[[], bool]) -> Iterator[int]:
        """Fills the pieces with the chunks, which lie one behind the other, and gives the checksum of each."""
        ...


class StoreChunks:
    """Every chunk, from where the checkpoint is published."""

    name = "store"

    def __init__(self, source: Source, checkpoint: CheckpointId, manifest: Manifest) -> None:
        self._source = source
        self._checkpoint = checkpoint
        self._object_bytes = {part.object: part.header_bytes + part.data_bytes for part in manifest.parts}
        self.run_chunks = source.run_chunks

    def read(self, run: Sequence[ChunkRange], pieces: Sequence[Piece], stopped: Callable[[], bool]) -> Iterator[int]:
        first = run[0]
        key = checkpoint_key(self._checkpoint, first.object)
        asked = Range(key, self._object_bytes[first.object], first.object_offset, pieces)
        return self._source.read(asked, stopped)


@dataclass(frozen=True, slots=True)
class Lane:
    """A source, what is to come from it, and how many threads ask it."""

    source: ChunkSource
    chunks: Sequence[ChunkRange]
    threads: int


class _Traffic:
    """One lane under way; guarded by the fetch's lock."""

    def __init__(self, lane: Lane) -> None:
        self.source = lane.source
        self.threads = lane.threads
        self.order = FetchOrder(lane.chunks)
        self.under_way = 0
        self.failures: Counter[int] = Counter()
        self.stopwatch = Stopwatch()


@dataclass(frozen=True, slots=True)
class _Again:
    traffic: _Traffic
    chunk: ChunkRange
    delay_s: float


class Fetch:
    """One filling of one segment. `on_end` is called once, from one of its threads, with the error or None.

    `on_chunk` is told of each chunk that is ready, and of which source it came.
    """

    def __init__(
        self,
        *,
        checkpoint: CheckpointId,
        region: native.Region,
        control: native.ControlBlock,
        lanes: Sequence[Lane],
        on_end: Callable[[FleetError | None], None],
        on_chunk: Callable[[ChunkRange, str], None] = lambda chunk, source: None,
    ) -> None:
        self._checkpoint = checkpoint
        self._region: native.Region | None = region
        self._control = control
        self._on_end = on_end
        self._on_chunk = on_chunk
        self._traffic = [_Traffic(lane) for lane in lanes]
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._error: FleetError | None = None
        self._threads = [
            threading.Thread(
                target=self._run, args=(number, level), name=f"{name}-{checkpoint[:8]}-{number}", daemon=True
            )
            for number, (level, name) in enumerate(
                (level, lane.source.name) for level, lane in enumerate(lanes) for _ in range(lane.threads)
            )
        ]
        self._running = len(self._threads)
        self.ready_bytes = 0

    def start(self) -> None:
        """Returns at once: each thread starts the next, because a busy machine takes a while to begin many."""
        self._threads[0].start()

    def first(self, chunks: Iterable[int]) -> None:
        """These before all others, of those that nobody fetches yet."""
        wanted = list(chunks)
        with self._changed:
            for traffic in self._traffic:
                traffic.order.first(wanted)

    def traffic(self) -> dict[str, tuple[int, float]]:
        """Bytes that each source gave, and the seconds that it took."""
        return {
            traffic.source.name: (traffic.stopwatch.size_bytes, traffic.stopwatch.busy_s) for traffic in self._traffic
        }

    def close(self, timeout_s: float) -> bool:
        """Abandons what is not there yet and wakes who waits for it; True if every thread ended in time.

        A thread stuck in a read ends at the source's own timeout and keeps the memory alive until then.
        """
        self._fail(Unavailable(f"the fetch of checkpoint {self._checkpoint[:12]} was abandoned by its node"))
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # ── a thread ───────────────────────────────────────────────────────────────────────────────────

    def _run(self, number: int, level: int) -> None:
        traffic = self._traffic[level]
        ending = 1
        try:
            if not self._start_next(number):
                ending = len(self._threads) - number
                raise Unavailable(f"checkpoint {self._checkpoint[:12]}: the node can start no more threads")
            while run := self._next_run(traffic):
                self._take(level, run)
        except Abandoned:
            pass
        except FleetError as error:
            self._fail(error)
        except Exception as error:
            log.exception("fetch failed in an unforeseen way")
            self._fail(StoreFailed(f"checkpoint {self._checkpoint[:12]}: {type(error).__name__}: {error}"))
        finally:
            with self._changed:
                self._running -= ending
                last = self._running == 0
            if last:
                self._region = None  # whoever keeps this fetch for its figures does not keep the memory
                self._on_end(self._error)

    def _start_next(self, number: int) -> bool:
        if number + 1 < len(self._threads):
            try:
                self._threads[number + 1].start()
            except RuntimeError:  # a limit of the system or of the node's group
                return False
        return True

    def _next_run(self, traffic: _Traffic) -> list[ChunkRange]:
        """Waits while a lane above may still fail and pass chunks down; nothing once all is done or lost."""
        with self._changed:
            while not self._stop.is_set():
                most = run_length(traffic.source.run_chunks, len(traffic.order), traffic.threads)
                if run := traffic.order.next_run(most):
                    traffic.under_way += 1
                    return run
                if not any(other.under_way or other.order for other in self._traffic):
                    self._changed.notify_all()
                    break
                self._changed.wait()
            return []

    def _take(self, level: int, run: list[ChunkRange]) -> None:
        """One run, verified chunk by chunk; what failed of it is put back, or passed to the lane below."""
        traffic = self._traffic[level]
        missing = list(run)
        failed: list[_Again] = []
        done_bytes = 0
        traffic.stopwatch.begin()
        try:
            pieces = [self._piece(chunk) for chunk in run]
            for found in traffic.source.read(run, pieces, self._stop.is_set):
                chunk = missing.pop(0)
                if found == chunk.checksum:
                    done_bytes += chunk.size_bytes
                    self._ready(chunk, traffic.source.name)
                else:
                    failed.append(self._failed(level, chunk, _Damaged(found)))
        except (SourceError, ObjectMissing, ObjectSize) as error:
            if missing:  # a source that stumbles over its own end has given all the same
                failed.append(self._failed(level, missing.pop(0), error))
        finally:
            traffic.stopwatch.end(done_bytes)
            with self._changed:
                traffic.order.put_back(missing)
                self._changed.notify_all()
            if failed:
                self._stop.wait(max(again.delay_s for again in failed))
            with self._changed:
                for again in failed:
                    again.traffic.order.put_back([again.chunk])
                traffic.under_way -= 1
                self._changed.notify_all()

    def _piece(self, chunk: ChunkRange) -> Piece:
        """Where it goes. Its pages are made now, so that lack of memory is an error and not a signal."""
        region = self._region
        assert region is not None
        room_bytes = -(-chunk.size_bytes // PAGE_BYTES) * PAGE_BYTES
        try:
            region.populate(chunk.segment_offset, room_bytes)
        except OSError as error:
            raise Unavailable(f"no memory for chunk {chunk.index} of {self._checkpoint[:12]}: {error}") from error
        return Piece(chunk.size_bytes, region.view(chunk.segment_offset, room_bytes))

    def _ready(self, chunk: ChunkRange, source: str) -> None:
        with self._changed:
            if self._error is not None or not self._control.mark_ready(chunk.index):
                return
            self.ready_bytes += chunk.size_bytes
        self._on_chunk(chunk, source)

    def _failed(self, level: int, chunk: ChunkRange, error: Exception) -> _Again:
        """Where and when to try again. Errors: what the waiters are told, if there is no such place."""
        traffic = self._traffic[level]
        with self._changed:
            traffic.failures[chunk.index] += 1
            failures = traffic.failures[chunk.index]
        delays_s = {_Damaged: (0.0,), SourceError: RETRY_DELAYS_S}.get(type(error), ())
        extra = {"chunk": chunk.index, "object": chunk.object, "source": traffic.source.name, "error": str(error)}
        if failures <= len(delays_s):
            log.warning("a chunk failed, trying again", extra=extra)
            return _Again(traffic, chunk, delays_s[failures - 1])
        if level + 1 < len(self._traffic):
            log.warning("a chunk failed, taking it from elsewhere", extra=extra)
            return _Again(self._traffic[level + 1], chunk, 0.0)
        raise self._explained(chunk, error) from error

    def _explained(self, chunk: ChunkRange, error: Exception) -> FleetError:
        what = f"chunk {chunk.index} of {self._checkpoint[:12]} ({chunk.object})"
        match error:
            case _Damaged(found=found):
                return ChecksumMismatch(
                    f"chunk {chunk.index} of {self._checkpoint[:12]} ({chunk.object} bytes {chunk.object_offset}–"
                    f"{chunk.object_offset + chunk.size_bytes - 1}): checksum {found:016x}, "
                    f"expected {chunk.checksum:016x}",
                    hint=f"the object in the store is damaged; {UPLOAD_AGAIN}",
                )
            case ObjectMissing():
                return CheckpointInvalid(f"{what}: the object is not in the store", hint=UPLOAD_AGAIN)
            case ObjectSize(expected_bytes=expected, found_bytes=found):
                how = "truncated" if found < expected else "another one"
                return CheckpointInvalid(
                    f"{what}: the object is {how}, {expected:,} bytes expected, {found:,} found", hint=UPLOAD_AGAIN
                )
            case SourceError():
                return store_failed(what, error)
            case _:
                raise error

    def _fail(self, error: FleetError) -> None:
        """The first error counts. Nothing becomes ready after it, so a failed segment stays failed."""
        with self._changed:
            if self._error is None and self._control.state == "filling":
                self._error = _without_frames(error)
                self._control.fail(error.code, error.message)
            self._stop.set()
            self._changed.notify_all()


def _without_frames(error: FleetError) -> FleetError:
    """Its frames hold views, and so the segment's memory, for as long as somebody keeps the error."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


class _Damaged(Exception):
    """The bytes that came are not the ones that were published."""

    def __init__(self, found: int) -> None:
        super().__init__(f"checksum {found:016x}")
        self.found = found
