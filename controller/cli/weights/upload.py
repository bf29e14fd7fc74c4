"""Sends objects to the store: several at a time, only those that it lacks, and the one that publishes them last.

An object is there whole or not at all, so what an upload that broke had sent whole is not sent again. A connection
that is cut is no end: the controller may have been restarted, and is back within seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event, Lock
from time import monotonic
from typing import Protocol

from ..output import ConnectionCut

UPLOADS = 4
"""At a time: one connection rarely fills a long line, and each holds a few megabytes at most."""
RETRY_S = 30.0
"""How long one object is tried again from its first break; a controller is back within 5 s."""
PAUSE_S = 0.25

Progress = Callable[[str, int, int], None]


class UploadTarget(Protocol):
    """What publishing needs of the store; `Server` is one. Several threads use it at once."""

    def object_size(self, key: str) -> int | None: ...

    def put_object(self, key: str, content: Iterator[bytes] | bytes, size_bytes: int) -> None: ...


@dataclass(frozen=True, slots=True)
class UploadObject:
    key: str
    size_bytes: int
    content: Callable[[], Iterator[bytes]]
    """Anew at each call, because a connection may be cut."""

    @classmethod
    def of(cls, key: str, data: bytes) -> UploadObject:
        return cls(key, len(data), lambda: iter((data,)))


class UploadAborted(Exception):
    """Another object of the same upload failed."""


def upload(items: Sequence[UploadObject], last: UploadObject, store: UploadTarget, progress: Progress) -> int:
    """Bytes that were sent; 0 if all was there. `last` is sent when everything else is."""
    missing = [item for item in items if store.object_size(item.key) != item.size_bytes]
    if not missing and store.object_size(last.key) == last.size_bytes:
        return 0
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
        self._lock = Lock()

    def send(self, item: UploadObject) -> None:
        """Errors: those of the store, after which no other object is begun or goes on."""
        try:
            self._send(item)
        except BaseException:
            self.stopped.set()
            raise

    def _send(self, item: UploadObject) -> None:
        first_cut_s: float | None = None
        while not self.stopped.is_set():
            counted = _Counted(self, item)
            try:
                self._store.put_object(item.key, counted.blocks(), item.size_bytes)
                return
            except ConnectionCut:
                first_cut_s = first_cut_s or monotonic()
                if monotonic() - first_cut_s > RETRY_S:
                    raise
            self.advance(-counted.sent)
            self.stopped.wait(PAUSE_S)
        raise UploadAborted(item.key)

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._progress("upload", self._done, self.total)


class _Counted:
    """An item's blocks once, counted as they go; ends with Stopped when there is no use in going on."""

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
