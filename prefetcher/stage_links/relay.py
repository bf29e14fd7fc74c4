"""Links between stages whose nodes cannot reach each other: relayed through the object store, which both reach.

HydraServe (section 8.5) ran where functions may not connect to each other, and let its workers communicate by a
shared object in remote storage. Here workers are unaware of it: each node gives its own worker a socket, and carries
the bytes. One direction of a pair of stages is one link; `relay_sender` and `relay_receiver` are its ends, each in
threads of its own, which end with their worker.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from fleetstart.runtime.contract.store_url import S3Url, parse_store

from ..sources.http_settings import HttpSettings
from .relay_messages import RelayLink
from .relay_receiver import RelayReceiver
from .relay_sender import RelaySender
from .relay_store import RelayStore

log = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Longest wait at shutdown for the last objects to be read or removed."""

Failed = Callable[[str], object]
"""Called with the reason when a link breaks, in another thread."""


class Relays:
    """The relayed links of one node. Thread-safe."""

    def __init__(self, bucket: str, prefix: str = "", http: HttpSettings | None = None) -> None:
        self._http = http or HttpSettings()
        self._bucket = bucket
        self._prefix = prefix
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._made = threading.Lock()
        self._objects: RelayStore | None = None
        self._threads: list[threading.Thread] = []
        self._outgoing: set[RelaySender] = set()

    def send(self, link: RelayLink, source: socket.socket, failed: Failed) -> None:
        """Relays what can be read from the socket. Owns the socket; closes it when the link breaks, and then calls
        `failed`."""
        self._start(lambda: self._send(link, source, failed), f"relay-out-{link.receiver}")

    def receive(self, link: RelayLink, connect: Callable[[], socket.socket], failed: Failed) -> Callable[[], None]:
        """Relays a sender's bytes to a connection that `connect` makes, in another thread, at the first bytes.
        Returns a function that stops it."""
        stopped = threading.Event()
        self._start(lambda: self._receive(link, connect, failed, stopped), f"relay-in-{link.sender}")
        return stopped.set

    def close(self) -> None:
        """Waits until the links have ended. Called once the workers have ended."""
        ends_s = time.monotonic() + CLOSE_S
        self._closing.set()
        with self._lock:
            threads, outgoing = list(self._threads), list(self._outgoing)
        for one in outgoing:
            one.expedite()
        for thread in threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        if left := sum(thread.is_alive() for thread in threads):
            log.warning("links through the object store have not ended", extra={"links": left})
        if self._objects is not None:
            self._objects.close()  # a link that has not ended closes the connection that it uses

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads = [other for other in self._threads if other.is_alive()]
            thread.start()
            self._threads.append(thread)

    def _send(self, link: RelayLink, source: socket.socket, failed: Failed) -> None:
        try:
            outgoing = RelaySender(link, self._store(), source, failed, self._closing)
        except BaseException as error:
            source.close()
            failed(f"no object store: {error}")
            raise
        with self._lock:
            self._outgoing.add(outgoing)
        try:
            outgoing.run()
        finally:
            with self._lock:
                self._outgoing.discard(outgoing)

    def _receive(
        self, link: RelayLink, connect: Callable[[], socket.socket], failed: Failed, stopped: threading.Event
    ) -> None:
        RelayReceiver(link, self._store(), connect, failed, stopped, self._closing).run()

    def _store(self) -> RelayStore:
        """The store's client, made late: it takes a third of a second, and most nodes never need it."""
        with self._made:
            if self._objects is None:
                self._objects = RelayStore(self._bucket, self._prefix, self._http)
            return self._objects


def open_relays(store: str, http: HttpSettings | None = None) -> Relays | None:
    """None where the store is a folder: all nodes that share it are on one machine, and can connect."""
    url = parse_store(store)
    return Relays(url.bucket, url.prefix, http) if isinstance(url, S3Url) else None
