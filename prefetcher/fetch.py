"""Brings one checkpoint's chunks into its segment, each verified before anybody sees it.

Threads take chunks in segment order, which is the order of use, from one shared counter: a static split
would leave the front waiting for its slowest share. A chunk that does not check is read once more and
then ends the fetch; a store that does not answer is asked again a few times. However it ends, the control
block says so, and whoever waits on it wakes. Which chunks exist is the manifest's affair, what becomes of
the segment that of `segments`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from itertools import count

from fleetstart import native
from fleetstart.prefetcher.sources import Abandoned, ObjectMissing, ObjectShort, Source, SourceError
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
    chunk_ranges,
    read_manifest,
)

log = logging.getLogger(__name__)

RETRY_DELAYS_S = (0.1, 0.3, 1.0)
"""Between tries of one read: a store that is restarted is back within them, a dead one holds nobody for long."""

UPLOAD_AGAIN = "upload the weights again: fs deploy"

Sleep = Callable[[float], object]


def with_retries(read: Callable[[], bytes | int], what: str, sleep: Sleep = time.sleep) -> bytes | int:
    """Errors: StoreFailed once the tries are used up; all but SourceError pass through at once."""
    for delay_s in RETRY_DELAYS_S:
        try:
            return read()
        except SourceError as error:
            log.warning("store did not answer, trying again", extra={"what": what, "error": str(error)})
            sleep(delay_s)
    try:
        return read()
    except SourceError as error:
        raise StoreFailed(
            f"{what}: the store failed {len(RETRY_DELAYS_S) + 1} times, last with: {error}",
            hint="check that the object store is up and that the node may read it",
        ) from error


def fetch_manifest(source: Source, checkpoint: CheckpointId) -> tuple[Manifest, bytes]:
    """Errors: WeightsMissing, CheckpointInvalid, StoreFailed. Blocks."""
    key = checkpoint_key(checkpoint, MANIFEST_OBJECT)
    try:
        data = with_retries(lambda: source.read_object(key, MANIFEST_MAX_BYTES), f"manifest of {checkpoint[:12]}")
    except ObjectMissing as error:
        raise WeightsMissing(
            f"checkpoint {checkpoint[:12]} is not in the store: no object {key}",
            hint="deploy the function again, its weights are uploaded with it",
        ) from error
    except ValueError as error:
        raise CheckpointInvalid(str(error)) from error
    assert isinstance(data, bytes)
    return read_manifest(data, checkpoint), data


class Fetch:
    """One filling of one segment. `on_end` is called once, from one of its threads, with the error or None."""

    def __init__(
        self,
        *,
        checkpoint: CheckpointId,
        manifest: Manifest,
        region: native.Region,
        control: native.ControlBlock,
        source: Source,
        threads: int,
        on_end: Callable[[FleetError | None], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._region = region
        self._control = control
        self._source = source
        self._on_end = on_end
        self._chunks = chunk_ranges(manifest)
        self._counter = count()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._error: FleetError | None = None
        self._running = min(threads, len(self._chunks))
        self._threads = [
            threading.Thread(target=self._run, name=f"fetch-{checkpoint[:8]}-{number}", daemon=True)
            for number in range(self._running)
        ]
        self._ready_bytes = 0
        self.total_bytes = sum(chunk.size_bytes for chunk in self._chunks)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def ready_bytes(self) -> int:
        return self._ready_bytes

    @property
    def error(self) -> FleetError | None:
        return self._error

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

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                index = next(self._counter)  # atomic under the GIL
                if index >= len(self._chunks):
                    break
                self._take(self._chunks[index])
        except Abandoned:
            pass
        except FleetError as error:
            self._fail(error)
        except Exception as error:
            log.exception("fetch failed in an unforeseen way")
            self._fail(StoreFailed(f"checkpoint {self._checkpoint[:12]}: {type(error).__name__}: {error}"))
        finally:
            with self._lock:
                self._running -= 1
                last = self._running == 0
            if last:
                self._on_end(self._error)

    def _take(self, chunk: ChunkRange) -> None:
        """One chunk, verified; the second read tells a flipped bit on the way from one in the store."""
        view = self._region.view(chunk.segment_offset, chunk.size_bytes)
        found = self._read(chunk, view)
        if found != chunk.checksum:
            log.warning("chunk does not check, reading it again", extra={"chunk": chunk.index, "object": chunk.object})
            found = self._read(chunk, view)
        if found != chunk.checksum:
            raise ChecksumMismatch(
                f"chunk {chunk.index} of {self._checkpoint[:12]} ({chunk.object} bytes {chunk.object_offset}–"
                f"{chunk.object_offset + chunk.size_bytes - 1}): checksum {found:016x}, expected {chunk.checksum:016x}",
                hint=f"the object in the store is damaged; {UPLOAD_AGAIN}",
            )
        with self._lock:
            if self._error is not None:
                return
            self._control.mark_ready(chunk.index)
            self._ready_bytes += chunk.size_bytes

    def _read(self, chunk: ChunkRange, view: memoryview) -> int:
        key = checkpoint_key(self._checkpoint, chunk.object)
        what = f"chunk {chunk.index} of {self._checkpoint[:12]} ({chunk.object})"

        def read() -> int:
            return self._source.read_range(key, chunk.object_offset, view, self._stop.is_set)

        try:
            found = with_retries(read, what, self._stop.wait)
        except ObjectMissing as error:
            raise CheckpointInvalid(
                f"{what}: the object is not in the store", hint="upload the weights again"
            ) from error
        except ObjectShort as error:
            raise CheckpointInvalid(
                f"{what}: the object is truncated, {error.expected_bytes:,} bytes expected, "
                f"{error.found_bytes:,} found",
                hint=UPLOAD_AGAIN,
            ) from error
        assert isinstance(found, int)
        return found

    def _fail(self, error: FleetError) -> None:
        """The first error counts. Nothing becomes ready after it, so a failed segment stays failed."""
        with self._lock:
            if self._error is None and self._control.state == "filling":
                self._error = error
                self._control.fail(error.code, error.message)
        self._stop.set()
