"""The ingress proxy: connections in to workers inside gVisor, whose sockets cannot be reached from outside.

The node listens for such a worker. For each connection it makes a socket pair, passes one end to the worker over its
control socket, and copies bytes until both sides have closed. A forwarder ends with its worker, connections
included.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from ..concurrency.threads import IoThread
from .acceptor import Acceptor
from .tunnel import carry

log = logging.getLogger(__name__)

IDLE_S = 7200.0
"""Idle timeout. The gateway decides when its connections end; one that was silent for longer has no gateway any
more."""
CONNECTIONS_PER_SLOT = 4
EXTRA_CONNECTIONS = 64
"""Connections to a worker beyond `CONNECTIONS_PER_SLOT` for each concurrent call: a gateway keeps its connections
for minutes, there are several gateways, and some connections are WebSockets."""

HandOver = Callable[[socket.socket], object]
"""Passes the worker its end of a connection, on the daemon's own loop; owns it from then on."""


class NodeIngress:
    """The ingress forwarders of one node. Its methods are called from the daemon's loop."""

    def __init__(self, io_thread: IoThread, descriptors: int) -> None:
        """`descriptors` is the process' limit. A fourth of it is for connections, two for each."""
        self._io_thread = io_thread
        self._limit = max(2, descriptors // 8)
        self._open = 0
        """Connections of all workers; used in the I/O thread."""

    def open(self, listener: socket.socket, slots: int, hand: HandOver) -> Callable[[], None]:
        """Starts forwarding to a worker of `slots` concurrent calls. Owns the listener. Returns a function that
        stops it."""
        limit = min(CONNECTIONS_PER_SLOT * slots + EXTRA_CONNECTIONS, self._limit // 2)  # one worker cannot take all
        forwarder = IngressForwarder(self, asyncio.get_running_loop(), listener, limit, hand)
        self._io_thread.call(forwarder.start)
        return lambda: self._io_thread.call(forwarder.stop)

    def acquire_slot(self) -> bool:
        if self._open >= self._limit:
            return False
        self._open += 1
        return True

    def release_slot(self) -> None:
        self._open -= 1


class IngressForwarder:
    """Forwards connections to one worker. Runs in the I/O thread, except for `hand`."""

    def __init__(
        self, ingress: NodeIngress, loop: asyncio.AbstractEventLoop, listener: socket.socket, limit: int, hand: HandOver
    ) -> None:
        self._acceptor = Acceptor(listener, self._on_connection)
        self._ingress = ingress
        self._daemon_loop = loop
        self._hand = hand
        self._limit = limit
        self._open = 0
        self._is_full = False

    def start(self) -> None:
        self._acceptor.start()

    def stop(self) -> None:
        self._acceptor.stop()

    def _on_connection(self, caller: socket.socket) -> None:
        if self._open >= self._limit or not self._ingress.acquire_slot():
            caller.close()
            if not self._is_full:
                log.warning("connections to a worker are rejected: too many", extra={"open": self._open})
            self._is_full = True  # logged once, until there is room again
            return
        self._is_full = False
        self._open += 1
        try:
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ours, its = socket.socketpair()
        except OSError as error:
            log.warning("cannot forward a connection to its worker", extra={"error": str(error)})
            caller.close()
            self._release()
            return
        ours.setblocking(False)
        self._acceptor.spawn(_carry(caller, ours), caller.close, ours.close, self._release)
        try:
            self._daemon_loop.call_soon_threadsafe(self._hand, its)
        except RuntimeError:
            its.close()  # the daemon's loop has ended

    def _release(self) -> None:
        self._open -= 1
        self._ingress.release_slot()


async def _carry(caller: socket.socket, worker: socket.socket) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        await carry(caller, worker, idle_s=IDLE_S, count=lambda sent, received: None)
