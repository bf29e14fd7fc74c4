"""The receiver's end of a link through the object store: objects in their order, as bytes of a connection.

It asks for the next object until it is there, the oftener the sooner one is due, and deletes it once the worker has
it. To its worker it is one more stage that connects to the listener. It ends with the sender's last object, with the
worker, or when the store or an object is not what it should be; what is left of the link then goes.
"""

from __future__ import annotations

import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable

from ..sources.base import SourceError
from .relay_messages import HEAD_BYTES, OBJECT_BYTES, InvalidRelayObject, RelayLink
from .relay_sender import WRITE_TIMEOUT_S, remove
from .relay_store import RelayStore, StoreRejection

log = logging.getLogger(__name__)

LEAST_S, MOST_S = 0.002, 0.1
"""Between two requests for the same object."""
SHARE = 1 / 16
"""Of the pause between two objects that was usual lately: that late, on average, the next one may be seen, and so many
requests it may cost."""
SMOOTHING = 0.3
RETRY_S = 0.05
DELIVER_S = 5.0
"""For a worker that does not read: as long as a stage waits for one that it is connected to."""


def poll_after_s(usual_s: float, since_s: float) -> float:
    """When to ask again, given the usual pause between objects and the one under way."""
    return min(MOST_S, max(LEAST_S, SHARE * max(usual_s, since_s)))


class RelayReceiver:
    """`connect` gives a connection to the worker, or OSError. `failed` is called once, in a thread, with the reason,
    unless sender or worker ended the link."""

    def __init__(
        self,
        link: RelayLink,
        objects: RelayStore,
        connect: Callable[[], socket.socket],
        failed: Callable[[str], object],
        stopped: threading.Event,
    ) -> None:
        """`stopped` is set when the worker has ended."""
        self._link = link
        self._objects = objects
        self._connect = connect
        self._failed = failed
        self._stopped = stopped
        self._worker: socket.socket | None = None
        self._read: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """Keys of objects that the worker has got."""

    def run(self) -> None:
        """Until the link has ended, and nothing of it is left that this end can remove."""
        remover = threading.Thread(target=self._delete, name="relay-delete", daemon=True)
        remover.start()
        try:
            self._follow()
        except (StoreRejection, InvalidRelayObject) as error:
            self._failed(str(error))
        except SourceError as error:
            self._failed(f"the object store does not give what stage {self._link.sender} sends: {error}")
        except TimeoutError:
            self._failed(f"its worker reads nothing of what stage {self._link.sender} sends")
        except OSError as error:
            log.debug("the worker ended the link", extra={"error": str(error)})
        finally:
            if self._worker is not None:
                self._worker.close()
            self._read.put(None)
            remover.join()
            remove(self._objects, self._link)

    def _follow(self) -> None:
        """Errors: those of the store, NotOfThisLink, OSError when the worker is gone."""
        sequence, usual_s, came_s = 0, MOST_S, time.monotonic()
        while not self._stopped.is_set() and not self._is_closed():
            sealed = self._next(sequence)
            now_s = time.monotonic()
            if sealed is None:
                self._stopped.wait(poll_after_s(usual_s, now_s - came_s))
                continue
            data, last = self._link.verify(sequence, sealed)
            if last:
                self._read.put(self._link.key(sequence))
                return
            self._deliver(data)
            self._read.put(self._link.key(sequence))
            usual_s += SMOOTHING * (now_s - came_s - usual_s)
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
        if self._worker is None:  # not before there is a first word: the worker waits for it, and not for long
            self._worker = self._connect()
            self._worker.settimeout(DELIVER_S)
        self._worker.sendall(data)

    def _is_closed(self) -> bool:
        """A stage says nothing on a link that comes to it: what can be read there is its end."""
        return self._worker is not None and bool(select.select([self._worker], [], [], 0)[0])

    def _delete(self) -> None:
        while (key := self._read.get()) is not None:
            try:
                self._objects.delete(key)
            except (SourceError, StoreRejection) as error:  # it goes with the rest in the end
                log.debug("an object could not be deleted", extra={"key": key, "error": str(error)})
