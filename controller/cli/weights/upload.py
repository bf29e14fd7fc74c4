"""Uploads objects to the store: several in parallel, only those that it lacks, and last the one that publishes them.

An object exists whole or not at all, so an upload that is repeated sends only the rest. What may be over within seconds
is waited for: a controller that is started anew, a store that is busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event, Lock
from time import monotonic
from typing import Protocol

from fleetstart.runtime.contract.errors import FleetError

from ..output import ConnectionCut, Unreachable

UPLOADS = 4
"""Parallel uploads: one connection rarely fills a long line, and each holds a few megabytes at most."""
RETRY_S = 30.0
"""How long one object is retried after its first break; a restarted controller is back within 5 s, in a container
within some more."""
PAUSE_S = 0.25

Progress = Callable[[str, int, int], None]


class UploadTarget(Protocol):
    """Store that publishing writes to; ApiClient is one. Several threads use it at once."""

    def object_size(self, key: str) -> int | None: ...

    def put_object(self, key: str, content: Iterator[bytes] | bytes, size_bytes: int) -> None: ...


class CheckpointTarget(UploadTarget, Protocol):
    """Store that checkpoints are published to."""

    def begin_upload(self, manifest: bytes) -> None:
        """Announces the parts of a checkpoint, as its manifest has them."""
        ...


@dataclass(frozen=True, slots=True)
class UploadObject:
    """One object to upload."""

    key: str
    size_bytes: int
    content: Callable[[], Iterator[bytes]]
    """Starts over at each call, since an upload may be retried."""

    @classmethod
    def of(cls, key: str, data: bytes) -> UploadObject:
        return cls(key, len(data), lambda: iter((data,)))


class UploadAborted(Exception):
    """The upload of another object failed, so this one was aborted."""


def upload(
    items: Sequence[UploadObject],
    last: UploadObject,
    store: UploadTarget,
    progress: Progress,
    *,
    announce: Callable[[], None] = lambda: None,
) -> int:
    """Uploads the objects, then `last`. Returns the bytes sent; 0 if the store had all. `announce` is called before
    the first one is sent."""
    missing = [item for item in items if store.object_size(item.key) != item.size_bytes]
    if not missing and store.object_size(last.key) == last.size_bytes:
        return 0
    announce()
    sending = _Sending(store, progress, sum(item.size_bytes for item in missing) + last.size_bytes)
    pool = ThreadPoolExecutor(UPLOADS)
    try:
        futures = [pool.submit(sending.send, item) for item in missing]
        wait(futures)
        for error in (future.exception() for future in futures):
            if error is not None and not isinstance(error, UploadAborted):
                raise error
        sending.send(last)
    finally:
        sending.stopped.set()
        pool.shutdown(cancel_futures=True)
    return sending.total


class _Sending:
    def __init__(self, store: UploadTarget, progress: Progress, total: int) -> None:
        self.stopped = Event()
        self.total = total
        self._store = store
        self._progress = progress
        self._done = 0
        self._reached = False
        """True once a connection was made: one that is refused later is to a controller that is being restarted."""
        self._lock = Lock()

    def send(self, item: UploadObject) -> None:
        """Sends one object. Errors: those of the store, after which the other objects are aborted."""
        try:
            self._send(item)
        except BaseException:
            self.stopped.set()
            raise

    def _send(self, item: UploadObject) -> None:
        first_break_s: float | None = None
        while not self.stopped.is_set():
            counted = _Counted(self, item)
            try:
                self._store.put_object(item.key, counted.blocks(), item.size_bytes)
                self._reached = True
                return
            except FleetError as error:
                first_break_s = first_break_s or monotonic()
                if not self._may_pass(error) or monotonic() - first_break_s > RETRY_S:
                    raise
            self.advance(-counted.sent)
            self.stopped.wait(PAUSE_S)
        raise UploadAborted(item.key)

    def _may_pass(self, error: FleetError) -> bool:
        """True for an error of a controller or a store that may be back in a moment. A server that was never reached
        is none of these."""
        if isinstance(error, ConnectionCut):
            self._reached = True
        if isinstance(error, Unreachable):
            return self._reached
        return error.retryable and error.retry_after_s is not None

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._progress("upload", self._done, self.total)


class _Counted:
    """Blocks of one attempt, counted as they are sent; raises UploadAborted when another object has failed."""

    def __init__(self, sending: _Sending, item: UploadObject) -> None:
        self.sent = 0
        self._sending = sending
        self._item = item

    def blocks(self) -> Iterator[bytes]:
        for block in self._item.content():
            if self._sending.stopped.is_set():
                raise UploadAborted(self._item.key)
            self.sent += len(block)
            self._sending.advance(len(block))
            yield block
