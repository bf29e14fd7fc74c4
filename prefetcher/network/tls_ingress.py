"""The TLS ingress: where controllers on other machines reach this node's workers.

The node listens for each of its workers, and lets in what shows a controller's certificate; the worker itself listens
on loopback, without TLS, and never sees the node's key. A connection that has not proved itself costs a descriptor and
some kilobytes for a few seconds, and there are never many of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from fleetstart.runtime.contract.identity import CONTROLLER, role_of

from ..concurrency.threads import IoThread
from .acceptor import Acceptor

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""Time for a connection to prove itself: a few round trips and signatures."""
STRANGERS_MAX = 32
"""Connections to one worker that have not proved themselves. One more closes the oldest: a controller needs
milliseconds, so whoever floods the port seldom keeps one out."""
CONNECT_S = 2.0
BACKLOG = 256


class TlsIngress:
    """The TLS listeners of one node. Its methods are called from the daemon's loop."""

    def __init__(self, io_thread: IoThread, context: Callable[[], ssl.SSLContext]) -> None:
        """`context` returns that of the newest certificate, from any thread."""
        self._io_thread = io_thread
        self._context = context

    def open(self, address: str, worker: tuple[str, int]) -> tuple[tuple[str, int], Callable[[], None]]:
        """Listens at the address for the worker at `worker`. Returns where, and a function that ends it. Errors:
        OSError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        forwarder = TlsForwarder(listener, worker, self._context)
        at: tuple[str, int] = listener.getsockname()[:2]
        self._io_thread.call(forwarder.start)
        return at, lambda: self._io_thread.call(forwarder.stop)


class TlsForwarder:
    """Forwards controllers' connections to one worker. Runs in the I/O thread."""

    def __init__(self, listener: socket.socket, worker: tuple[str, int], context: Callable[[], ssl.SSLContext]) -> None:
        self._acceptor = Acceptor(listener, self._on_connection)
        self._worker = worker
        self._context = context
        self._strangers: dict[socket.socket, None] = {}
        """Connections that have not proved themselves, the oldest first."""
        self._open: set[_Side] = set()

    def start(self) -> None:
        self._acceptor.start()

    def stop(self) -> None:
        self._acceptor.stop()
        for side in tuple(self._open):
            side.abort()

    def _on_connection(self, caller: socket.socket) -> None:
        if len(self._strangers) >= STRANGERS_MAX:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # ends its handshake
        self._strangers[caller] = None
        with contextlib.suppress(OSError):
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._acceptor.spawn(self._serve(caller), lambda: self._strangers.pop(caller, None), caller.close)

    async def _serve(self, caller: socket.socket) -> None:
        """Ends once both sides are connected: from then on, they live by their transports."""
        loop = asyncio.get_running_loop()
        outer = _Side(self._open)
        try:
            # The socket stays open until it is proved: the transport has a descriptor of its own.
            transport, _ = await loop.connect_accepted_socket(
                lambda: outer, caller.dup(), ssl=self._context(), ssl_handshake_timeout=HANDSHAKE_S
            )
        except (OSError, TimeoutError) as error:  # with ssl.SSLError
            log.debug("rejected a connection to a worker", extra={"error": str(error)})
            return
        role = role_of(transport.get_extra_info("peercert"))
        if role != CONTROLLER:
            log.warning("rejected a connection to a worker: not of a controller", extra={"role": role})
            transport.abort()
            return
        inner = _Side(self._open)
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.create_connection(lambda: inner, *self._worker)
        except (OSError, TimeoutError):
            transport.abort()  # the worker is gone
            return
        outer.join(inner)


class _Side(asyncio.Protocol):
    """One of the two connections. What comes from it goes to the other, which holds it back while it does not read."""

    def __init__(self, opened: set[_Side]) -> None:
        self._opened = opened
        self._transport: asyncio.Transport | None = None
        self._other: _Side | None = None
        self._early: list[bytes] = []
        """What came before the other was there: reading is paused by then, so it is little."""

    def join(self, other: _Side) -> None:
        self._other, other._other = other, self
        for data in self._early:
            other.write(data)
        self._early.clear()
        for side, peer in ((self, other), (other, self)):
            if side._transport is None or side._transport.is_closing():
                peer.close()
            else:
                side._transport.resume_reading()

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._opened.add(self)
        transport.pause_reading()
        if (raw := transport.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._early.append(data)
        else:
            self._other.write(data)

    def eof_received(self) -> bool:
        """TLS has no half of a connection: the end of one direction is the end of both, after what was written."""
        return False

    def pause_writing(self) -> None:
        if self._other is not None and self._other._transport is not None:
            self._other._transport.pause_reading()

    def resume_writing(self) -> None:
        other = self._other._transport if self._other is not None else None
        if other is not None and not other.is_closing():
            other.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._opened.discard(self)
        if self._other is not None:
            self._other.close()
