"""The sender of a relayed link: turns what its worker writes into consecutive objects.

Several threads take turns reading the worker's socket and write their object concurrently, so that a store's latency
is paid once and not for each object. The receiver deletes what it has read: an object that stays for too long means
that it does not read, and the worker's connection is closed. The end of the worker's socket is an object of its own;
after it nothing is left in the bucket.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from ..sources.errors import SourceError
from .relay_messages import OBJECT_BYTES, RelayLink
from .relay_store import RelayStore, StoreRejection

log = logging.getLogger(__name__)

WRITERS = 3
"""Concurrent writes of one link."""
GATHER_S = 0.0005
"""A frame is written in two parts: one object for both saves the receiver a request."""
GATHER_BYTES = 256 * 1024
WINDOW = 64
"""Objects written and not yet deleted by the receiver."""
IDLE_CHECK_S = 1.0
"""Interval of checks whether the receiver reads, while there is room in the window."""
CHECK_INTERVAL_S = 0.05
ACK_TIMEOUT_S = 3.0
CLOSING_ACK_S = 1.0
"""Timeout for an object to be read, also the first one: the controller first has to tell the receiver's node."""
WRITE_TIMEOUT_S = 2.0
"""Timeout for one object to be written: the receiver is without data for as long, and gives up soon after."""
RETRY_S = 0.05
REMOVE_S = 10.0
"""Longest time for which removing a link's objects is tried again, at a store that does not answer in time."""
REMOVE_RETRY_S = 0.5
LATE_S = 3.0
"""A store that did not answer in time may still carry out a write, after its repetition was read and deleted."""


class RelaySender:
    """Sender of one link. Owns the socket. `failed` is called once, in a thread, with the reason, unless the worker
    ended the link."""

    def __init__(
        self,
        link: RelayLink,
        objects: RelayStore,
        source: socket.socket,
        failed: Callable[[str], object],
        closing: threading.Event,
    ) -> None:
        """`closing` is set when the daemon shuts down."""
        self._link = link
        self._shutdown = closing
        self._objects = objects
        self._source = source
        self._failed = failed
        self._read_lock = threading.Lock()
        self._changed = threading.Condition()
        self._next = 0
        """Sequence number of the next object."""
        self._under_way: set[int] = set()
        """Sequence numbers being written."""
        self._acknowledged = 0
        """The receiver has read all objects before this one."""
        self._ended = False
        """No more is read from the socket."""
        self._why = ""
        self._closing = False
        self._repeated = False
        """True if an object was written twice, or may yet be."""

    def run(self) -> None:
        """Runs until the link has ended and this end has removed its objects."""
        writers = [
            threading.Thread(target=self._guarded, args=(self._write,), name="relay-put", daemon=True)
            for _ in range(WRITERS)
        ]
        for writer in writers:
            writer.start()
        self._guarded(self._watch)
        for writer in writers:
            writer.join()
        self._source.close()
        if self._why:
            self._failed(self._why)
        if self._repeated:
            with self._changed:
                self._changed.wait_for(lambda: self._closing, LATE_S)
        if self._acknowledged < self._next or self._repeated:
            remove(self._objects, self._link, self._shutdown)

    def expedite(self) -> None:
        """Shortens the timeout for the receiver to read: the daemon is shutting down."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _guarded(self, body: Callable[[], None]) -> None:
        """Runs one thread's work; an unexpected error ends the link, so that other threads do not wait for ever."""
        try:
            body()
        except Exception as error:
            log.exception("unexpected error in a relay")
            self._fail(f"{type(error).__name__}: {error}")

    # ── the worker's bytes ─────────────────────────────────────────────────────────────────────────

    def _write(self) -> None:
        while True:
            with self._read_lock:
                if not self._wait_for_window():
                    return
                data = self._received()
                with self._changed:
                    if self._why:
                        return
                    sequence, self._next = self._next, self._next + 1
                    self._under_way.add(sequence)
                    self._ended = not data
            self._put(sequence, self._link.seal(sequence, data, last=not data))
            with self._changed:
                self._under_way.discard(sequence)
                self._changed.notify_all()

    def _wait_for_window(self) -> bool:
        """Waits for room in the window; False once the link has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._next - self._acknowledged < WINDOW)
            return not self._ended

    def _received(self) -> bytes:
        """Bytes available together; empty at the end of the socket."""
        data = bytearray()
        try:
            data += self._source.recv(GATHER_BYTES)
            time.sleep(GATHER_S if data else 0.0)
            while data and len(data) + GATHER_BYTES <= OBJECT_BYTES:
                more = self._source.recv(GATHER_BYTES, socket.MSG_DONTWAIT)
                if not more:  # the next turn will see the end again
                    break
                data += more
        except OSError:  # no more bytes for now; a reset counts as the end
            pass
        return bytes(data)

    def _put(self, sequence: int, sealed: bytes) -> None:
        began_s = time.monotonic()
        while not self._why:
            try:
                self._objects.put(self._link.key(sequence), sealed)
                return
            except StoreRejection as error:
                self._fail(str(error))
            except SourceError as error:
                self._repeated = True
                if time.monotonic() - began_s > WRITE_TIMEOUT_S:
                    self._fail(f"cannot write to the object store: {error}")
                else:
                    time.sleep(RETRY_S)

    def _fail(self, why: str) -> None:
        with self._changed:
            if not self._why:
                self._why = why
            self._ended = True
            self._changed.notify_all()
        try:
            self._source.shutdown(socket.SHUT_RDWR)  # wakes the reading thread, and the worker sees the end
        except OSError:
            log.debug("the worker had ended the link before")

    # ── the receiver's progress ────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        """Watches the receiver's progress until all is written and read, or the link has failed."""
        checked, since_s = -1, 0.0
        while not self._why:
            with self._changed:
                self._changed.wait_for(self._should_check, IDLE_CHECK_S)
                if self._ended and not self._under_way and self._acknowledged == self._next:
                    return
                written = min(self._under_way, default=self._next)
            if checked < self._acknowledged <= written - 1:
                checked, since_s = written - 1, time.monotonic()
            if checked < self._acknowledged:  # no object to check
                time.sleep(CHECK_INTERVAL_S)
                continue
            if self._is_deleted(checked):
                with self._changed:
                    self._acknowledged = checked + 1
                    self._changed.notify_all()
            elif time.monotonic() - since_s > (CLOSING_ACK_S if self._closing else ACK_TIMEOUT_S):
                self._fail(f"stage {self._link.receiver} does not read what stage {self._link.sender} sends")
            else:
                time.sleep(CHECK_INTERVAL_S)

    def _should_check(self) -> bool:
        half = self._next - self._acknowledged >= WINDOW // 2
        return half or bool(self._why) or ((self._ended or self._closing) and not self._under_way)

    def _is_deleted(self, sequence: int) -> bool:
        try:
            return not self._objects.exists(self._link.key(sequence))
        except (SourceError, StoreRejection) as error:
            log.debug("an object could not be looked at", extra={"error": str(error)})
            return False


def remove(objects: RelayStore, link: RelayLink, closing: threading.Event) -> None:
    """Removes the link's objects. What a store keeps nevertheless is swept by the controller once it is old."""
    until_s = time.monotonic() + REMOVE_S
    while True:
        try:
            for key in objects.keys(link.folder):
                objects.delete(key)
            return
        except (SourceError, StoreRejection) as error:
            if isinstance(error, StoreRejection) or time.monotonic() > until_s or closing.wait(REMOVE_RETRY_S):
                log.warning(
                    "objects of a link are left in the store", extra={"folder": link.folder, "error": str(error)}
                )
                return
