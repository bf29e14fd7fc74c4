"""A reader's connections to holders: made, proved by a grant, and kept warm for the next fetch."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable

import msgspec

from fleetstart.runtime.contract.node.peer_frames import Received
from fleetstart.runtime.contract.node.peers import NONCE_BYTES, Grant, Peer, Transport, grant_proof

from ..sources.errors import SourceError, SourceLost
from . import frames
from .frames import Hello
from .links import Link, PlainLink, TlsLink, prepare

CONNECT_S = 2.0
HELLO_S = 8.0
"""Time for the answer to a Hello, with the holder's wait for a checkpoint that its own order has yet to bring."""
WARM_S = 30.0
"""Time that an unused connection is kept: less than the holder keeps it."""
WARM_MAX = 8
"""Kept to one holder."""


class Connection:
    """A proved connection. `is_warm`: it was used before, so the holder may have closed it meanwhile."""

    def __init__(self, link: Link, holder_nonce: bytes) -> None:
        self.link = link
        self.is_warm = False
        self._holder_nonce = holder_nonce
        self._grant: Grant | None = None

    def prove(self, peer: Peer, deadline_s: float, transport: Transport = "tcp") -> None:
        """Shows the holder the grant, unless it is the one that it knows. Errors: SourceLost if it refuses; OSError,
        EOFError, ValueError."""
        if self._grant == peer.grant:
            return
        nonce = os.urandom(NONCE_BYTES)
        proof = grant_proof(peer.secret, self._holder_nonce, nonce)
        data = msgspec.json.encode(Hello(peer.grant, nonce, proof, transport))
        leaves = b"" if self._grant is None else Received(leaves=True).encode()
        self.link.send(leaves + frames.LENGTH.pack(len(data)) + data, deadline_s)
        (size_bytes,) = frames.LENGTH.unpack(self.link.receive(frames.LENGTH.size, deadline_s))
        if size_bytes > frames.REFUSAL_MAX_BYTES:
            raise ValueError(f"an answer of {size_bytes:,} bytes to a grant")
        if size_bytes:
            why = self.link.receive(size_bytes, deadline_s).decode(errors="replace")
            raise SourceLost(f"{peer.node} lets this node read nothing: {why if why in frames.REFUSALS else '?'}")
        self._grant = peer.grant


class PeerConnections:
    """The connections of one node to all holders. Thread-safe."""

    def __init__(self, context: Callable[[], ssl.SSLContext]) -> None:
        """`context` returns that of the newest certificate. It may raise ValueError: the node has none."""
        self._context = context
        self._lock = threading.Lock()
        self._warm: dict[tuple[str, str], list[tuple[Connection, float]]] = {}
        self._closed = False

    def take(
        self, peer: Peer, *, fresh: bool = False, window_bytes: int | None = None, transport: Transport = "tcp"
    ) -> Connection:
        """A connection that may read what the peer's grant says. `fresh`: none that was used before; `window_bytes`
        limits what it may send at once. A connection with a limit is not kept, nor is one of RDMA.

        Errors: SourceLost if the peer refuses; SourceError if it cannot be reached or does not answer as a peer does.
        """
        deadline_s = time.monotonic() + HELLO_S
        is_kept = not fresh and window_bytes is None and transport == "tcp"
        connection = self._take_warm(peer) if is_kept else None
        try:
            if connection is not None:
                try:
                    connection.prove(peer, deadline_s)
                    return connection
                except (OSError, EOFError, ValueError):  # the holder has closed it
                    connection.link.close()
            connection = self._connect(peer, window_bytes)
            connection.prove(peer, deadline_s, transport)
            return connection
        except (OSError, EOFError, ValueError, OverflowError) as error:  # with ssl.SSLError
            if connection is not None:
                connection.link.close()
            raise SourceError(f"{peer.node} at {peer.address}: {str(error) or type(error).__name__}") from error
        except SourceLost:
            if connection is not None:
                connection.link.close()
            raise

    def give_back(self, peer: Peer, connection: Connection) -> None:
        """Keeps a connection on which nothing is under way."""
        connection.is_warm = True
        now_s = time.monotonic()
        with self._lock:
            kept = self._warm.setdefault((peer.address, peer.host), [])
            if self._closed or len(kept) >= WARM_MAX:
                connection.link.close()
            else:
                kept.append((connection, now_s))
            self._close_old(now_s)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for kept in self._warm.values():
                for connection, _ in kept:
                    connection.link.close()
            self._warm.clear()

    def _take_warm(self, peer: Peer) -> Connection | None:
        with self._lock:
            self._close_old(time.monotonic())
            kept = self._warm.get((peer.address, peer.host))
            return kept.pop()[0] if kept else None

    def _close_old(self, now_s: float) -> None:
        for at in list(self._warm):
            for connection, since_s in self._warm[at]:
                if now_s - since_s >= WARM_S:
                    connection.link.close()
            self._warm[at] = [one for one in self._warm[at] if now_s - one[1] < WARM_S]
            if not self._warm[at]:
                del self._warm[at]

    def _connect(self, peer: Peer, window_bytes: int | None) -> Connection:
        host, _, port = peer.address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if window_bytes is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
            sock.settimeout(CONNECT_S)
            sock.connect((host.strip("[]"), int(port)))
            prepare(sock)
            link = self._secured(sock, peer)
        except BaseException:
            sock.close()
            raise
        try:
            challenge = link.receive(frames.CHALLENGE_BYTES, time.monotonic() + CONNECT_S)
            if not challenge.startswith(frames.MAGIC):
                raise ValueError("it is no peer's server")
        except BaseException:
            link.close()
            raise
        return Connection(link, challenge[len(frames.MAGIC) :])

    def _secured(self, sock: socket.socket, peer: Peer) -> Link:
        if not peer.host:
            return PlainLink(sock)
        secured = self._context().wrap_socket(sock, server_hostname=peer.host, do_handshake_on_connect=False)
        with contextlib.ExitStack() as undo:
            undo.callback(secured.close)
            secured.do_handshake()
            undo.pop_all()
        return TlsLink(secured)
