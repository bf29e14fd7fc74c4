"""The peer server of a node: lets readers with a grant read chunks in its memory, and nobody else.

A thread accepts, and each connection has one of its own, so that a reader that is slow holds nobody up. Strangers,
connections that have not proved themselves, are few and have seconds; proved ones are bounded in number, also for each
reader.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import count

from fleetstart.runtime.contract.identity import node_of
from fleetstart.runtime.contract.ids import NodeId

from .frames import Hello, Refusal
from .grants import PeerKeys, check_hello
from .holdings import Holdings
from .links import Link, PlainLink, TlsLink, prepare
from .rdma import NodeRdma
from .session import PROVE_S, Closed, Session

log = logging.getLogger(__name__)

BACKLOG = 128
STRANGERS_MAX = 32
"""One more closes the oldest: a reader needs milliseconds, so whoever floods the port seldom keeps one out."""
SESSIONS_MAX = 128
READER_SESSIONS_MAX = 16
"""Of one reader; each has a few streams for each fetch."""
PAUSE_S = 0.1
"""Pause when the process has no descriptor or thread left."""
CLOSE_S = 2.0


class ReaderConnection:
    """A socket, and the one that took its place once it is encrypted: whatever `end` wakes."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def end(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # of a TLS connection, it touches no state


class PeerServer:
    """The server. Made, opened and closed on the event loop."""

    def __init__(
        self,
        *,
        node: NodeId,
        epoch: str,
        holdings: Holdings,
        keys: PeerKeys,
        context: Callable[[], ssl.SSLContext] | None,
        rdma: NodeRdma | None = None,
    ) -> None:
        """`context` returns that of the newest certificate; None: readers come without TLS. `rdma`: what readers that
        ask for it are served by."""
        self._node = node
        self._epoch = epoch
        self._holdings = holdings
        self._keys = keys
        self._context = context
        self._rdma = rdma
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._numbers = count(1)
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._connections: set[ReaderConnection] = set()
        self._strangers: dict[ReaderConnection, None] = {}
        """Connections that have not proved themselves, the oldest first."""
        self._proved: dict[ReaderConnection, NodeId] = {}
        self._threads: set[threading.Thread] = set()
        self._sent: Counter[NodeId] = Counter()

    def open(self, address: str) -> tuple[str, int]:
        """Listens at the address, at a port that is free; returns where. Errors: OSError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        self._listener = listener
        self._acceptor = self._start(lambda: self._accept(listener), "peer-server")
        at: tuple[str, int] = listener.getsockname()[:2]
        return at

    @property
    def sent_bytes(self) -> dict[NodeId, int]:
        """Bytes of chunks sent since the daemon started, by reader."""
        with self._lock:
            return dict(self._sent)

    @property
    def sessions(self) -> int:
        """Number of readers' connections that have proved themselves."""
        with self._lock:
            return len(self._proved)

    def close(self) -> None:
        """Ends all connections. Blocks for CLOSE_S at most."""
        self._stop.set()
        until_s = time.monotonic() + CLOSE_S
        if self._listener is not None and self._acceptor is not None:
            ReaderConnection(self._listener).end()  # wakes the thread that accepts
            self._acceptor.join(CLOSE_S)  # after it, there are no new connections
        with self._lock:
            connections, threads = list(self._connections), list(self._threads)
        for connection in connections:
            connection.end()
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    # ── decisions for sessions ─────────────────────────────────────────────────────────────────────

    def _refusal(self, hello: Hello, holder_nonce: bytes, certified: str | None) -> Refusal | None:
        def check(key: bytes | None) -> Refusal | None:
            return check_hello(
                hello,
                holder=self._node,
                epoch=self._epoch,
                key=key,
                holder_nonce=holder_nonce,
                certified=certified,
                now_unix_ms=int(time.time() * 1000),
            )

        async def ask() -> tuple[Refusal | None]:
            return (await self._keys.proves(check),)

        answer = self._holdings.ask(ask())
        return answer[0] if answer is not None else "no_key"

    def _admit(self, connection: ReaderConnection, reader: NodeId) -> bool:
        with self._lock:
            others = [node for one, node in self._proved.items() if one is not connection]
            if len(others) >= SESSIONS_MAX or others.count(reader) >= READER_SESSIONS_MAX:
                return False
            self._proved[connection] = reader
            self._strangers.pop(connection, None)
            return True

    def _note_sent(self, reader: NodeId, size_bytes: int) -> None:
        with self._lock:
            self._sent[reader] += size_bytes

    # ── threads ────────────────────────────────────────────────────────────────────────────────────

    def _start(self, work: Callable[[], None], name: str) -> threading.Thread:
        """Errors: RuntimeError if there can be no more threads."""

        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:  # `close` joins what it finds: only what has been started
            thread.start()
            self._threads.add(thread)
        return thread

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while not self._stop.is_set():
                try:
                    sock, _ = listener.accept()
                except OSError as error:
                    if not self._stop.is_set():
                        log.warning("cannot accept a peer's connection", extra={"error": str(error)})
                    self._stop.wait(PAUSE_S)
                    continue
                connection = ReaderConnection(sock)
                self._take_in(connection)
                try:
                    self._start(functools.partial(self._serve, connection), f"peer-server-{next(self._numbers)}")
                except RuntimeError as error:
                    log.warning("cannot serve a peer", extra={"error": str(error)})
                    self._forget(connection)
                    self._stop.wait(PAUSE_S)

    def _take_in(self, stranger: ReaderConnection) -> None:
        with self._lock:
            if len(self._strangers) >= STRANGERS_MAX:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.end()
            self._strangers[stranger] = None
            self._connections.add(stranger)

    def _forget(self, connection: ReaderConnection) -> None:
        connection.socket.close()
        with self._lock:
            self._connections.discard(connection)
            self._strangers.pop(connection, None)
            self._proved.pop(connection, None)

    def _serve(self, connection: ReaderConnection) -> None:
        """Serves one connection until it ends."""
        try:
            link, certified = self._link(connection)
            Session(
                link,
                name=os.urandom(4).hex(),
                certified=certified,
                holdings=self._holdings,
                refusal=self._refusal,
                admit=functools.partial(self._admit, connection),
                sent=self._note_sent,
                stopped=self._stop.is_set,
                rdma=self._rdma,
            ).run()
        except Closed as error:
            log.info("a peer's connection was closed", extra={"reason": str(error)})
        except (OSError, EOFError, ValueError) as error:
            log.debug("a peer's connection ended", extra={"error": str(error)})
        except Exception:
            log.exception("unexpected error while serving a peer")
        finally:
            self._forget(connection)

    def _link(self, connection: ReaderConnection) -> tuple[Link, str | None]:
        """The link, and the node in the reader's certificate, None without TLS. Errors: OSError, ssl.SSLError."""
        sock = connection.socket
        if self._context is None:
            return PlainLink(sock), None
        prepare(sock)
        sock.settimeout(PROVE_S)
        secured = self._context().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        connection.socket = secured
        secured.do_handshake()
        return TlsLink(secured), node_of(secured.getpeercert())
