"""The native transport's frames where bytes must pass through Python: inside TLS, and at a measured pace.

`FramedReader` and `FramedServer` do what `native.TcpReader` and `native.TcpServer` do, in the same frames, so that
either speaks with any of the others. What the fields mean is in native/src/transport/frames.hpp.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fleetstart import native
from fleetstart.runtime.contract.node.peer_frames import (
    ANSWER_BYTES,
    MAX_OUTSTANDING,
    REQUEST_BYTES,
    AnswerHeader,
    ReadRequest,
    Received,
    Status,
    decode_answer,
    decode_request,
)

from ..sources.throttle import BackgroundThrottle
from .links import POLL_S, Link

LOOK_S = 0.02
"""Interval at which a server that waits for chunks looks for more requests."""


@dataclass(frozen=True, slots=True)
class FramedCompletion:
    """A read that has ended, as `native.Completion`."""

    request: int
    status: Status
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class _Pending:
    into: memoryview
    answer_by_s: float


class _Body:
    """An answer whose bytes are arriving."""

    def __init__(self, request: int, into: memoryview) -> None:
        self.request = request
        self.into = into
        self.filled = 0
        self.checksum = native.Checksum(into)


class FramedReader:
    """Reads ranges from a peer over one link. Used by one thread. Errors of all: OSError, EOFError."""

    def __init__(
        self, link: Link, stall_s: float, throttle: BackgroundThrottle | None = None, stopped: Callable[[], bool] = bool
    ) -> None:
        """`stall_s`: how long the peer may bring nothing. `throttle` paces what comes; `stopped` ends its pauses."""
        self._link = link
        self._stall_s = stall_s
        self._throttle = throttle
        self._stopped = stopped
        self._pending: dict[int, _Pending] = {}
        self._body: _Body | None = None
        self._moved_s = 0.0

    def submit_into(self, request: int, offset: int, into: memoryview, wait_s: float = 0.0) -> None:
        """Asks for as many bytes as the buffer has, which the peer waits for up to `wait_s`."""
        now_s = time.monotonic()
        if not self._pending:
            self._moved_s = now_s
        asked = ReadRequest(
            request=request,
            offset=offset,
            size_bytes=len(into),
            wait_ms=int(wait_s * 1000),
            outstanding=len(self._pending),
        )
        self._link.send(asked.encode(), now_s + self._stall_s)
        self._pending[request] = _Pending(into, now_s + wait_s)

    def poll(self, timeout_s: float) -> list[FramedCompletion]:
        """What has completed; empty after `timeout_s`, which may be POLL_S late."""
        until_s = time.monotonic() + timeout_s
        while self._pending:
            completion = self._receive()
            if completion is not None:
                return [completion]
            now_s = time.monotonic()
            if now_s >= self._stalls_s():
                raise TimeoutError(f"it brought nothing for {self._stall_s:g} s")
            if now_s >= until_s:
                break
        return []

    def cancel(self) -> None:
        """Ends the connection."""
        self._link.abort()

    def release(self) -> None:
        """Leaves the connection, on which nothing is outstanding, to who uses it next."""
        if self._pending:
            raise OSError(f"{len(self._pending)} requests are outstanding")

    @property
    def error(self) -> str | None:
        return None  # it raises

    def _receive(self) -> FramedCompletion | None:
        """The next step of an answer; a completion if that was the last. None also after POLL_S of nothing."""
        if self._body is not None:
            return self._fill(self._body)
        if not self._link.waits(POLL_S):
            return None
        try:
            answer = decode_answer(self._link.receive(ANSWER_BYTES, time.monotonic() + self._stall_s))
            pending = self._pending.get(answer.request)
            if pending is None or answer.size_bytes not in (0, len(pending.into)):
                raise ValueError(
                    f"{answer.size_bytes:,} bytes for request {answer.request}, which did not ask for them"
                )
        except ValueError as error:
            raise ConnectionError(str(error)) from error
        self._moved_s = time.monotonic()
        if answer.status != "ok":
            return self._finish(FramedCompletion(answer.request, answer.status))
        self._body = _Body(answer.request, pending.into)
        return None

    def _fill(self, body: _Body) -> FramedCompletion | None:
        most_bytes = self._throttle.portion_bytes if self._throttle is not None else None
        before, body.filled = body.filled, self._link.fill(body.into, body.checksum, body.filled, most_bytes)
        if self._throttle is not None:
            self._throttle.wait(body.filled - before, self._stopped)
        if body.filled > before:
            self._moved_s = time.monotonic()
        if body.filled < len(body.into):
            return None
        self._body = None
        return self._finish(FramedCompletion(body.request, "ok", body.checksum.digest()))

    def _finish(self, completion: FramedCompletion) -> FramedCompletion:
        del self._pending[completion.request]
        if not self._pending:
            self._link.send(Received().encode(), time.monotonic() + self._stall_s)
        return completion

    def _stalls_s(self) -> float:
        """When the peer must have brought something: it may be waiting, for us, for chunks of its own."""
        since_s = self._moved_s
        if self._body is None:
            since_s = max(since_s, min(pending.answer_by_s for pending in self._pending.values()))
        return since_s + self._stall_s


@dataclass(frozen=True, slots=True)
class _Waiting:
    asked: ReadRequest
    until_s: float


class FramedServer:
    """Serves ranges of a segment to the reader of one link, what is ready first. Used by one thread.

    Its bytes are copies before they are sent: the segment's memory may be reused at any time.
    """

    def __init__(
        self,
        link: Link,
        region: native.Region,
        control: native.ControlBlock,
        *,
        slab_bytes: int,
        chunk_bytes: int,
        stall_s: float,
    ) -> None:
        """`stall_s`: time for an answer to leave."""
        self._link = link
        self._region = region
        self._control = control
        self._slab_bytes = slab_bytes
        self._chunk_bytes = chunk_bytes
        self._stall_s = stall_s
        self._until_s = 0.0
        self._waiting: deque[_Waiting] = deque()
        self._unreceived = 0
        """Answers that the reader has not called received."""
        self.sent_bytes = 0

    def run(self, until_unix_ms: int, idle_s: float) -> str:
        """Serves until the reader closes ("closed"), the grant ends ("expired"), the reader leaves the connection to
        its next handshake ("left"), or has asked for nothing for `idle_s` ("idle"). ValueError for what no reader
        sends; OSError of the link, with TimeoutError for one that takes nothing for `stall_s`."""
        asked_s = time.monotonic()
        self._until_s = asked_s + until_unix_ms / 1000 - time.time()
        while time.monotonic() < self._until_s:
            try:
                frame = self._next_frame()
            except EOFError:
                return "closed"
            if frame is not None:
                asked_s = time.monotonic()
                if isinstance(frame, Received) and frame.leaves:
                    return "left"
            elif self._waiting:
                self._answer_one()
                asked_s = time.monotonic()
            elif time.monotonic() - asked_s >= idle_s:
                return "idle"
        return "expired"

    def _next_frame(self) -> ReadRequest | Received | None:
        """The next request; None if there is none now, or for POLL_S if nobody waits."""
        if not self._link.waits(0.0 if self._waiting else POLL_S):
            return None
        now_s = time.monotonic()
        frame = decode_request(self._link.receive(REQUEST_BYTES, now_s + self._stall_s))
        unreceived = frame.outstanding - len(self._waiting)
        is_left = isinstance(frame, Received) and frame.leaves
        if not 0 <= unreceived <= self._unreceived or (is_left and frame.outstanding):
            raise ValueError(
                f"the reader has {frame.outstanding} requests outstanding, it says; {len(self._waiting)} wait, and "
                f"{self._unreceived} answers are on their way"
            )
        self._unreceived = unreceived
        if isinstance(frame, ReadRequest):
            if len(self._waiting) == MAX_OUTSTANDING:
                raise ValueError(f"more than {MAX_OUTSTANDING} requests are outstanding")
            self._waiting.append(_Waiting(frame, now_s + frame.wait_ms / 1000))
        return frame

    def _answer_one(self) -> None:
        """Answers the first request that needs to wait no longer; if there is none, waits for LOOK_S."""
        now_s = time.monotonic()
        for waiting in self._waiting:
            if (status := self._status_of(waiting, now_s)) is not None:
                self._waiting.remove(waiting)
                self._answer(waiting.asked, status)
                return
        first, last = self._chunks_of(self._waiting[0].asked)
        with contextlib.suppress(TimeoutError, native.SegmentFailed):
            self._control.wait(first, last, LOOK_S)

    def _chunks_of(self, asked: ReadRequest) -> tuple[int, int]:
        return asked.offset // self._chunk_bytes, (asked.offset + asked.size_bytes - 1) // self._chunk_bytes

    def _status_of(self, waiting: _Waiting, now_s: float) -> Status | None:
        first, last = self._chunks_of(waiting.asked)
        is_inside = waiting.asked.offset + waiting.asked.size_bytes <= self._region.size_bytes
        if not is_inside or last >= self._control.chunk_count:
            return "refused"
        if all(self._control.is_ready(chunk) for chunk in range(first, last + 1)):
            return "ok"
        if self._control.state == "failed":
            return "gone"
        return "not_ready" if now_s >= waiting.until_s else None

    def _answer(self, asked: ReadRequest, status: Status) -> None:
        deadline_s = min(self._until_s, time.monotonic() + self._stall_s)
        self._unreceived += 1
        if status != "ok":
            self._link.send(AnswerHeader(request=asked.request, status=status).encode(), deadline_s)
            return
        header = AnswerHeader(request=asked.request, status="ok", size_bytes=asked.size_bytes)
        self._link.send(header.encode(), deadline_s)
        at, end = asked.offset, asked.offset + asked.size_bytes
        while at < end:
            size_bytes = min(end - at, self._slab_bytes - at % self._slab_bytes)
            self._link.send(self._region.view(at, size_bytes), deadline_s)
            at += size_bytes
        self.sent_bytes += asked.size_bytes
