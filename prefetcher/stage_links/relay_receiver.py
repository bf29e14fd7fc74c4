"""The receiver of a relayed link: reads objects in order and writes their bytes to a connection to the worker.

It polls for the next object, the more often the sooner one is due, and deletes it once the worker has it. To its
worker it is one more stage that connects to the listener. It ends with the sender's last object, with the worker, or
when the store or an object is invalid; it then removes the rest of the link.
"""

from __future__ import annotations

import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable

from fleetstart.runtime.contract.process.moving_average import MovingAverage

from ..sources.errors import SourceError
from .relay_messages import HEAD_BYTES, OBJECT_BYTES, InvalidRelayObject, RelayLink
from .relay_sender import WRITE_TIMEOUT_S, remove
from .relay_store import RelayStore, StoreRejection

log = logging.getLogger(__name__)

LEAST_S, MOST_S = 0.002, 0.1
"""Bounds of the pause between two requests for the same object."""
SHARE = 1 / 16
"""Poll interval as a share of the recent mean time between objects: the mean delay, against the number of requests."""
WEIGHT = 0.3
RETRY_S = 0.05
DELIVER_S = 5.0
"""Timeout for a worker that does not read: as long as a stage waits for a connected stage."""


def poll_after_s(usual_s: float, since_s: float) -> float:
    """The next poll interval, from the mean time between objects and the time since the last one."""
    return min(MOST_S, max(LEAST_S, SHARE * max(usual_s, since_s)))


class RelayReceiver:
    """Receiver of one link. `connect` returns a connection to the worker, or raises OSError. `failed` is called
    once, in a thread, with the reason, unless sender or worker ended the link."""

    def __init__(
        self,
        link: RelayLink,
        objects: RelayStore,
        connect: Callable[[], socket.socket],
        failed: Callable[[str], object],
        stopped: threading.Event,
        closing: threading.Event,
    ) -> None:
        """`stopped` is set when the worker has ended, `closing` when the daemon shuts down."""
        self._link = link
        self._objects = objects
        self._connect = connect
        self._failed = failed
        self._stopped = stopped
        self._closing = closing
        self._worker: socket.socket | None = None
        self._read: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """Keys of objects that the worker has received."""

    def run(self) -> None:
        """Runs until the link has ended and this end has removed its objects."""
        remover = threading.Thread(target=self._delete, name="relay-delete", daemon=True)
        remover.start()
        try:
            self._follow()
        except (StoreRejection, InvalidRelayObject) as error:
            self._failed(str(error))
        except SourceError as error:
            self._failed(f"cannot read from the object store what stage {self._link.sender} sends: {error}")
        except TimeoutError:
            self._failed(f"its worker does not read what stage {self._link.sender} sends")
        except OSError as error:
            log.debug("the worker ended the link", extra={"error": str(error)})
        finally:
            if self._worker is not None:
                self._worker.close()
            self._read.put(None)
            remover.join()
            remove(self._objects, self._link, self._closing)

    def _follow(self) -> None:
        """Reads and delivers objects until the last. Errors: those of the store, InvalidRelayObject, OSError if the
        worker is gone."""
        sequence, usual_s, came_s = 0, MovingAverage(MOST_S, count=10), time.monotonic()
        while not self._stopped.is_set() and not self._is_closed():
            sealed = self._next(sequence)
            now_s = time.monotonic()
            if sealed is None:
                self._stopped.wait(poll_after_s(usual_s.value, now_s - came_s))
                continue
            data, last = self._link.unseal(sequence, sealed)
            if last:
                self._read.put(self._link.key(sequence))
                return
            self._deliver(data)
            self._read.put(self._link.key(sequence))
            usual_s = usual_s.fold(now_s - came_s, WEIGHT)
            sequence, came_s = sequence + 1, now_s

    def _next(self, sequence: int) -> bytes | None:
        began_s = time.monotonic()
        while True:
            try:
                return self._objects.get(self._link.key(sequence), HEAD_BYTES + OBJECT_BYTES)
            except SourceError:
                if time.monotonic() - began_s > WRITE_TIMEOUT_S or self._stopped.wait(RETRY_S):
                    raise

    def _deliver(self, data: bytes) -> None:
        if self._worker is None:  # at the first bytes: the worker waits only briefly for them once connected
            self._worker = self._connect()
            self._worker.settimeout(DELIVER_S)
        self._worker.sendall(data)

    def _is_closed(self) -> bool:
        """True if the worker closed its connection: a stage writes nothing on an incoming link, so readable means
        closed."""
        return self._worker is not None and bool(select.select([self._worker], [], [], 0)[0])

    def _delete(self) -> None:
        while (key := self._read.get()) is not None:
            try:
                self._objects.delete(key)
            except (SourceError, StoreRejection) as error:  # removed with the rest at the end
                log.debug("an object could not be deleted", extra={"key": key, "error": str(error)})
