"""The way in to workers that cannot listen where their callers would find them: inside gVisor, sockets are its own.

The node listens for such a worker, and for each connection makes a pair of sockets, of which the worker gets one end
over its control socket. Bytes are carried between the two until both have said their last. A forwarder ends with its
worker, connections included.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from ..concurrency.io_thread import IoThread
from .acceptor import Acceptor
from .tunnel import carry

log = logging.getLogger(__name__)

IDLE_S = 7200.0
"""The gateway decides when its connections end; one that said nothing for longer has no gateway any more."""
CONNECTIONS_PER_SLOT = 4
EXTRA_CONNECTIONS = 64
"""Connections to a worker beside four for each call that it takes at a time: a gateway keeps what it has opened for
minutes, there are several, and some connections are WebSockets."""

HandOver = Callable[[socket.socket], object]
"""Gives a worker its end of a connection, on the daemon's own loop. Owns it from then on."""


class NodeIngress:
    """Of one node. Its methods are for the daemon's own loop."""

    def __init__(self, io_thread: IoThread, descriptors: int) -> None:
        """`descriptors`: what the process may have. A fourth of them is for connections, two for each."""
        self._io_thread = io_thread
        self._limit = max(2, descriptors // 8)
        self._open = 0
        """Connections of all workers; the thread's."""

    def open(self, listener: socket.socket, slots: int, hand: HandOver) -> Callable[[], None]:
        """For a worker that takes `slots` calls at a time. Owns the listener from now on. What is returned ends the
        way in."""
        limit = min(
            CONNECTIONS_PER_SLOT * slots + EXTRA_CONNECTIONS, self._limit // 2
        )  # nobody but one worker gets all
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
    """One worker's. Lives in the thread, but for `hand`."""

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
                log.warning("a worker's callers are turned away: too many", extra={"open": self._open})
            self._is_full = True  # said once, until there is room again
            return
        self._is_full = False
        self._open += 1
        try:
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ours, its = socket.socketpair()
        except OSError as error:
            log.warning("a call's connection cannot be handed on", extra={"error": str(error)})
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
