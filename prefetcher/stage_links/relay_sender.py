"""The sender's end of a link through the object store: what its worker writes becomes objects, one behind the other.

Some threads take turns at the worker's socket and put what they have got each for itself, so that a store's slowness
is paid once and not for each object. The receiver's end deletes what it has read: an object that stays for too long
means that nobody reads, and the worker learns of it as of any link that breaks. The end of the worker's socket is an
object of its own, after which nothing is left in the bucket, whoever has to see to it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from ..sources.base import SourceError
from .relay_messages import OBJECT_BYTES, RelayLink
from .relay_store import RelayStore, StoreRejection

log = logging.getLogger(__name__)

WRITERS = 3
"""Requests under way at once, of one link."""
GATHER_S = 0.0005
"""A frame is written in two parts: one object for both is one request less for the receiver to wait for."""
GATHER_BYTES = 256 * 1024
WINDOW = 64
"""Objects that may lie in the store and wait for the receiver, which has deleted the older ones."""
IDLE_CHECK_S = 1.0
"""Between two looks at whether the receiver reads, while there is room in the window."""
CHECK_INTERVAL_S = 0.05
ACK_TIMEOUT_S = 3.0
CLOSING_ACK_S = 1.0
"""For an object to be read, also the first one: the receiver's node hears from the controller that it shall."""
WRITE_TIMEOUT_S = 2.0
"""For one object to be written: the receiver hears nothing for as long, and misses the stage soon after."""
RETRY_S = 0.05
LATE_S = 1.0
"""A store that did not answer in time may still carry out what was asked, after its repetition was read and deleted."""


class RelaySender:
    """Owns the socket. `failed` is called once, in a thread, with the reason, unless the worker ended the link."""

    def __init__(
        self, link: RelayLink, objects: RelayStore, source: socket.socket, failed: Callable[[str], object]
    ) -> None:
        self._link = link
        self._objects = objects
        self._source = source
        self._failed = failed
        self._read_lock = threading.Lock()
        self._changed = threading.Condition()
        self._next = 0
        """Sequence of the next object."""
        self._under_way: set[int] = set()
        """Being written."""
        self._acknowledged = 0
        """The receiver has read all before it."""
        self._ended = False
        """Nothing more is read from the socket."""
        self._why = ""
        self._closing = False
        self._repeated = False
        """Some object was written twice, or may yet be."""

    def run(self) -> None:
        """Until the link has ended and nothing of it is left, or nothing that this end can remove."""
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
            remove(self._objects, self._link)

    def expedite(self) -> None:
        """The daemon ends: whoever has not read by now has a second to."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _guarded(self, body: Callable[[], None]) -> None:
        """A fault of one of its threads is the end of the link, not of a thread that the others wait for."""
        try:
            body()
        except Exception as error:
            log.exception("a relay failed")
            self._fail(f"{type(error).__name__}: {error}")

    # ── the worker's bytes ─────────────────────────────────────────────────────────────────────────

    def _write(self) -> None:
        while True:
            with self._read_lock:
                if not self._room():
                    return
                data = self._received()
                with self._changed:
                    if self._why:
                        return
                    sequence, self._next = self._next, self._next + 1
                    self._under_way.add(sequence)
                    self._ended = not data
            self._put(sequence, self._link.sign(sequence, data, last=not data))
            with self._changed:
                self._under_way.discard(sequence)
                self._changed.notify_all()

    def _room(self) -> bool:
        """Waits for it in the window; False once the link has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._next - self._acknowledged < WINDOW)
            return not self._ended

    def _received(self) -> bytes:
        """What came together; nothing at the end."""
        data = bytearray()
        try:
            data += self._source.recv(GATHER_BYTES)
            time.sleep(GATHER_S if data else 0.0)
            while data and len(data) + GATHER_BYTES <= OBJECT_BYTES:
                more = self._source.recv(GATHER_BYTES, socket.MSG_DONTWAIT)
                if not more:  # the next turn will see the end again
                    break
                data += more
        except OSError:  # nothing more for now, or a reset: the same as the end
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
                    self._fail(f"the object store does not take it: {error}")
                else:
                    time.sleep(RETRY_S)

    def _fail(self, why: str) -> None:
        with self._changed:
            if not self._why:
                self._why = why
            self._ended = True
            self._changed.notify_all()
        try:
            self._source.shutdown(socket.SHUT_RDWR)  # who waits at it sees the end, and so does the worker
        except OSError:
            log.debug("the worker had ended the link before")

    # ── the receiver ───────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        """Until all is written and read, or the link has failed."""
        checked, since_s = -1, 0.0
        while not self._why:
            with self._changed:
                self._changed.wait_for(self._should_check, IDLE_CHECK_S)
                if self._ended and not self._under_way and self._acknowledged == self._next:
                    return
                written = min(self._under_way, default=self._next)
            if checked < self._acknowledged <= written - 1:
                checked, since_s = written - 1, time.monotonic()
            if checked < self._acknowledged:  # nothing to look at
                time.sleep(CHECK_INTERVAL_S)
                continue
            if self._is_deleted(checked):
                with self._changed:
                    self._acknowledged = checked + 1
                    self._changed.notify_all()
            elif time.monotonic() - since_s > (CLOSING_ACK_S if self._closing else ACK_TIMEOUT_S):
                self._fail(f"stage {self._link.receiver} reads nothing of what stage {self._link.sender} sends it")
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


def remove(objects: RelayStore, link: RelayLink) -> None:
    """Whatever is left of the link. What a store keeps nevertheless, the controller sweeps once it is old."""
    try:
        for key in objects.keys(link.folder):
            objects.delete(key)
    except (SourceError, StoreRejection) as error:
        log.warning("objects of a link are left in the store", extra={"folder": link.folder, "error": str(error)})
