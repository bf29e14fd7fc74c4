"""One reader's connection, as its holder serves it: grants, requests, chunks; in a thread of its own.

The connection may read one checkpoint at a time, the one of its last grant, until that ends. It pins the segment while
it reads, and for a moment after, so that a reader that only keeps its connection warm holds no memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from fleetstart import native
from fleetstart.runtime.contract.ids import NodeId, WorkerId
from fleetstart.runtime.contract.node.peers import NONCE_BYTES, Grant

from . import frames
from .frames import Hello, Refusal
from .holdings import Held, Holdings
from .links import POLL_S, Link

PROVE_S = 5.0
"""Time for a connection to prove itself: a few round trips and signatures."""
APPEAR_S = 5.0
"""Wait for a checkpoint that its grant names and that is not in memory: its order may come later than its reader."""
WAIT_MOST_S = 60.0
"""Longest wait for a chunk that is on its way, whatever the reader asks for."""
SEND_S = 20.0
"""Time for a chunk to leave. A reader that takes longer is dropped: it keeps the segment from being evicted."""
PIN_S = 1.0
"""Time without a request after which the pin is taken back."""
LOOK_S = 0.005
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
    ) -> None:
        """`certified`: the node in the reader's certificate, None without TLS. `refusal` checks a Hello against the
        holder's nonce; `admit` is False if there are too many readers; `sent` gets the bytes of each chunk sent."""
        self._link = link
        self._pin_name = WorkerId(f"peer-{name}")
        self._certified = certified
        self._holdings = holdings
        self._refusal, self._admit, self._sent = refusal, admit, sent
        self._stopped = stopped
        self._nonce = os.urandom(NONCE_BYTES)
        self._leave: _Leave | None = None
        self._held: Held | None = None
        self._requested_s = time.monotonic()

    def run(self) -> None:
        """Serves until the reader leaves, and closes the connection. Errors: Closed; OSError, EOFError of the link;
        ValueError for a request that is none."""
        prove_by_s = time.monotonic() + PROVE_S
        try:
            self._link.send(frames.MAGIC + self._nonce, prove_by_s)
            while True:
                if self._leave is not None:
                    self._await_request(self._leave)
                deadline_s = prove_by_s if self._leave is None else time.monotonic() + PROVE_S
                head = self._link.receive(frames.REQUEST.size, deadline_s)
                kind, number, wait_ms, _ = frames.REQUEST.unpack(head)
                self._requested_s = time.monotonic()
                if kind == frames.HELLO:
                    self._greet(number, deadline_s)
                elif kind == frames.READ and self._leave is not None:
                    self._serve(self._leave, number, wait_ms / 1000)
                elif kind == frames.STREAM and self._leave is not None:
                    self._stream(self._leave)
                else:
                    raise ValueError(f"a request of kind {kind}")
        finally:
            self._link.close()  # first: what the kernel still sends are the segment's own pages
            self._unpin()

    # ── grants ─────────────────────────────────────────────────────────────────────────────────────

    def _greet(self, length: int, deadline_s: float) -> None:
        if length > frames.HELLO_MAX_BYTES:
            self._refuse("malformed")
        try:
            hello = msgspec.json.decode(self._link.receive(length, deadline_s), type=Hello)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._refuse("malformed")
        self._leave_segment()
        if refusal := self._refusal(hello, self._nonce, self._certified):
            self._refuse(refusal)
        if not self._admit(hello.grant.reader):
            self._refuse("too_many")
        left_s = hello.grant.expires_unix_ms / 1000 - time.time()
        self._leave = _Leave(hello.grant, time.monotonic() + left_s)
        if self._hold(min(APPEAR_S, left_s)) is None:
            self._refuse("not_in_memory")
        self._respond(frames.OK, 0, 0)

    def _refuse(self, refusal: Refusal) -> NoReturn:
        self._respond(frames.REFUSED, 0, len(refusal))
        self._link.send(refusal.encode(), time.monotonic() + PROVE_S)
        raise Closed(refusal)

    # ── requests ───────────────────────────────────────────────────────────────────────────────────

    def _await_request(self, leave: _Leave) -> None:
        while not self._link.waits(POLL_S):
            self._check(leave)
            idle_s = time.monotonic() - self._requested_s
            if idle_s > IDLE_S:
                raise Closed("idle")
            if idle_s > PIN_S and self._link.has_sent_all():
                self._unpin()

    def _serve(self, leave: _Leave, index: int, wait_s: float) -> None:
        self._check(leave)
        held = self._hold(0.0)
        chunk = held.chunks.get(index) if held is not None else None
        if held is None or chunk is None:
            self._respond(frames.FAILED if held is None else frames.INVALID, index, 0)
            raise Closed("the segment is gone" if held is None else f"there is no chunk {index}")
        if not self._is_ready(held, leave, index, min(wait_s, WAIT_MOST_S)):
            self._respond(frames.NOT_READY, index, 0)
            return
        deadline_s = min(leave.until_s, time.monotonic() + SEND_S)
        self._link.send(frames.RESPONSE.pack(frames.OK, index, chunk.size_bytes), deadline_s)
        slab, offset = divmod(chunk.segment_offset, held.slab_bytes)
        view = held.region.view(chunk.segment_offset, chunk.size_bytes)
        self._link.send_chunk(view, held.slabs[slab], offset, deadline_s)
        self._requested_s = time.monotonic()
        self._sent(leave.grant.reader, chunk.size_bytes)

    def _stream(self, leave: _Leave) -> None:
        """Serves by the native transport until the reader leaves it. Errors: Closed, ValueError."""
        fd = self._link.native_fd()
        if fd is None:
            raise ValueError("a stream inside TLS")
        while True:
            self._await_request(leave)
            ended = self._run_stream(leave, fd)
            self._requested_s = time.monotonic()
            if ended == "left":
                return
            if ended != "idle":
                raise Closed(f"the stream has ended: {ended}")

    def _run_stream(self, leave: _Leave, fd: int) -> str:
        held = self._hold(0.0)
        if held is None:
            raise Closed("the segment is gone")
        everything = [(0, held.control.chunk_count)]
        server = native.TcpServer(fd, held.region, held.control, held.chunk_bytes, everything, SEND_S)
        try:
            return server.run(leave.grant.expires_unix_ms, PIN_S)
        except native.NativeError as error:
            raise ValueError(str(error)) from error
        finally:
            if server.sent_bytes:
                self._sent(leave.grant.reader, server.sent_bytes)

    def _is_ready(self, held: Held, leave: _Leave, index: int, wait_s: float) -> bool:
        """Waits until the chunk is there; False if it is not in time."""
        until_s = time.monotonic() + wait_s
        while True:
            if held.segment.error is not None:
                self._fail(index, str(held.segment.error.message))
            try:
                held.control.wait(index, index, max(0.0, min(POLL_S, until_s - time.monotonic())))
                return True
            except TimeoutError:
                self._check(leave)
                if time.monotonic() >= until_s:
                    return False
            except native.SegmentFailed as error:
                self._fail(index, str(error.args[1]))

    def _fail(self, index: int, why: str) -> NoReturn:
        self._respond(frames.FAILED, index, 0)
        raise Closed(why)

    def _check(self, leave: _Leave) -> None:
        """Errors: Closed, if the session shall end."""
        if self._stopped():
            raise Closed("the node is shutting down")
        if time.monotonic() >= leave.until_s:
            self._respond(frames.EXPIRED, 0, 0)
            raise Closed("the grant has expired")

    def _respond(self, status: int, index: int, size_bytes: int) -> None:
        self._link.send(frames.RESPONSE.pack(status, index, size_bytes), time.monotonic() + PROVE_S)

    # ── the pin ────────────────────────────────────────────────────────────────────────────────────

    def _hold(self, wait_s: float) -> Held | None:
        if self._held is None and self._leave is not None:
            self._held = self._holdings.pin(self._leave.grant.checkpoint, self._pin_name, wait_s)
        return self._held

    def _leave_segment(self) -> None:
        """Ends the grant so far. Errors: Closed, if the reader asks for another checkpoint before it has this one's
        bytes."""
        until_s = time.monotonic() + PROVE_S
        while self._held is not None and not self._link.has_sent_all():
            if self._stopped() or time.monotonic() >= until_s:
                raise Closed("the reader leaves its bytes")
            time.sleep(LOOK_S)
        self._unpin()
        self._leave = None

    def _unpin(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._holdings.unpin(held, self._pin_name)
