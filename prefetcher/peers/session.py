"""One reader's connection, as its holder serves it: grants, requests, chunks; in a thread of its own.

The connection may read one checkpoint at a time, the one of its last grant, until that ends. It pins the segment while
it reads, and for a moment after, so that a reader that only keeps its connection warm holds no memory. Bytes that are
still on their way then are no reason to keep it: the native server sees to it that their pages are not used again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import msgspec

from fleetstart import native
from fleetstart.runtime.contract.ids import NodeId, WorkerId
from fleetstart.runtime.contract.node.peers import NONCE_BYTES, Grant

from . import frames
from .framed import FramedServer
from .frames import Hello, Refusal
from .holdings import Held, Holdings
from .links import POLL_S, Link
from .rdma import NodeRdma

if TYPE_CHECKING:
    from fleetstart.native._rdma import RdmaServer

log = logging.getLogger(__name__)

PROVE_S = 5.0
"""Time for a connection to prove itself: a few round trips and signatures."""
APPEAR_S = 5.0
"""Wait for a checkpoint that its grant names and that is not in memory: its order may come later than its reader."""
SEND_S = 20.0
"""Time for a chunk to leave. A reader that takes longer is dropped: it keeps the segment from being evicted."""
PIN_S = 1.0
"""Time without a request after which the pin is taken back."""
IDLE_S = 60.0
"""Time without a request after which the connection is closed."""


class Closed(Exception):
    """The connection shall end: its grant, its segment, or its server has."""


@dataclass(slots=True)
class _Leave:
    """What the session may read, and until when."""

    grant: Grant
    until_s: float


class Session:
    """The holder's side of one connection."""

    def __init__(
        self,
        link: Link,
        *,
        name: str,
        certified: str | None,
        holdings: Holdings,
        refusal: Callable[[Hello, bytes, str | None], Refusal | None],
        admit: Callable[[NodeId], bool],
        sent: Callable[[NodeId, int], None],
        stopped: Callable[[], bool],
        rdma: NodeRdma | None = None,
    ) -> None:
        """`certified`: the node in the reader's certificate, None without TLS. `refusal` checks a Hello against the
        holder's nonce; `admit` is False if there are too many readers; `sent` gets the bytes of each chunk sent."""
        self._link = link
        self._pin_name = WorkerId(f"peer-{name}")
        self._certified = certified
        self._holdings = holdings
        self._refusal, self._admit, self._sent = refusal, admit, sent
        self._stopped = stopped
        self._rdma = rdma
        self._nonce = os.urandom(NONCE_BYTES)
        self._leave: _Leave | None = None
        self._held: Held | None = None

    def run(self) -> None:
        """Serves until the reader leaves, and closes the connection. Errors: Closed; OSError, EOFError of the link;
        ValueError for a request that is none."""
        prove_by_s = time.monotonic() + PROVE_S
        try:
            self._link.send(frames.MAGIC + self._nonce, prove_by_s)
            while True:
                leave, by_rdma = self._greet(prove_by_s)
                if by_rdma is not None:
                    self._serve_rdma(leave, by_rdma)
                self._serve(leave)
                prove_by_s = time.monotonic() + PROVE_S
        finally:
            self._link.close()
            self._unpin()

    # ── grants ─────────────────────────────────────────────────────────────────────────────────────

    def _greet(self, deadline_s: float) -> tuple[_Leave, RdmaServer | None]:
        """What the reader may read from now on, and what serves it if it asks for RDMA. Errors: Closed."""
        (length,) = frames.LENGTH.unpack(self._link.receive(frames.LENGTH.size, deadline_s))
        if length > frames.HELLO_MAX_BYTES:
            self._refuse("malformed")
        try:
            hello = frames.read_hello(self._link.receive(length, deadline_s))
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._refuse("malformed")
        self._unpin()
        self._leave = None
        if refusal := self._refusal(hello, self._nonce, self._certified):
            self._refuse(refusal)
        if not self._admit(hello.grant.reader):
            self._refuse("too_many")
        left_s = hello.grant.expires_unix_ms / 1000 - time.time()
        leave = self._leave = _Leave(hello.grant, time.monotonic() + left_s)
        held = self._hold(min(APPEAR_S, left_s))
        if held is None:
            self._refuse("not_in_memory")
        by_rdma = self._rdma_server(held) if hello.transport == "rdma" else None
        self._link.send(frames.LENGTH.pack(0), time.monotonic() + PROVE_S)
        return leave, by_rdma

    def _refuse(self, refusal: Refusal) -> NoReturn:
        self._link.send(frames.LENGTH.pack(len(refusal)) + refusal.encode(), time.monotonic() + PROVE_S)
        raise Closed(refusal)

    # ── requests ───────────────────────────────────────────────────────────────────────────────────

    def _serve(self, leave: _Leave) -> None:
        """Serves until the reader leaves the connection to its next handshake. Errors: Closed, ValueError."""
        requested_s = time.monotonic()
        while True:
            self._await_request(leave, requested_s)
            ended = self._serve_frames(leave)
            requested_s = time.monotonic()
            if ended == "left":
                return
            if ended != "idle":
                raise Closed(f"it has ended: {ended}")

    def _await_request(self, leave: _Leave, requested_s: float) -> None:
        while not self._link.waits(POLL_S):
            if self._stopped():
                raise Closed("the node is shutting down")
            if time.monotonic() >= leave.until_s:
                raise Closed("the grant has expired")
            idle_s = time.monotonic() - requested_s
            if idle_s > IDLE_S:
                raise Closed("idle")
            if idle_s > PIN_S:
                self._unpin()

    def _serve_frames(self, leave: _Leave) -> str:
        held = self._hold(0.0)
        if held is None:
            raise Closed("the segment is gone")
        server = self._server(held)
        try:
            return server.run(leave.grant.expires_unix_ms, PIN_S)
        except native.NativeError as error:
            raise ValueError(str(error)) from error
        finally:
            if server.sent_bytes:
                self._sent(leave.grant.reader, server.sent_bytes)

    def _server(self, held: Held) -> native.TcpServer | FramedServer:
        fd = self._link.native_fd()
        if fd is not None:
            everything = [(0, held.control.chunk_count)]
            return native.TcpServer(fd, held.region, held.control, held.chunk_bytes, everything, SEND_S)
        return FramedServer(
            self._link,
            held.region,
            held.control,
            slab_bytes=held.slab_bytes,
            chunk_bytes=held.chunk_bytes,
            stall_s=SEND_S,
        )

    def _rdma_server(self, held: Held) -> RdmaServer:
        fd = self._link.native_fd()
        if self._rdma is None or fd is None:
            self._refuse("no_rdma")
        try:
            return self._rdma.server(fd, held)
        except OSError as error:
            log.warning(
                "a segment cannot be registered for RDMA: raise the limit of locked memory (LimitMEMLOCK, ulimit -l)",
                extra={"error": str(error)},
            )
            self._refuse("no_rdma")

    def _serve_rdma(self, leave: _Leave, server: RdmaServer) -> NoReturn:
        """Serves until the end of the connection: by RDMA it has one grant."""
        try:
            ended = server.run(leave.grant.expires_unix_ms)
        except native.NativeError as error:
            raise ValueError(str(error)) from error
        finally:
            if server.ready_bytes:
                self._sent(leave.grant.reader, server.ready_bytes)
        raise Closed(f"it has ended: {ended}")

    # ── the pin ────────────────────────────────────────────────────────────────────────────────────

    def _hold(self, wait_s: float) -> Held | None:
        if self._held is None and self._leave is not None:
            self._held = self._holdings.pin(self._leave.grant.checkpoint, self._pin_name, wait_s)
        return self._held

    def _unpin(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._holdings.unpin(held, self._pin_name)
