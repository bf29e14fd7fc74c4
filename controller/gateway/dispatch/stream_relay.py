"""Relays a worker's response to the client piece by piece, as it comes.

An event stream with resume markers whose worker is lost continues at another worker (`stream_resume`); any other
response that had begun is truncated. A slow client slows the worker down, and nothing piles up here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

import aiohttp

from fleetstart.runtime.contract.errors import FleetError, HandlerFailed, WorkerLost
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.orders import WorkerStatus
from fleetstart.runtime.contract.worker_headers import CONTINUE_HEADER, ERROR_HEADER

from ...http.asgi import OWN_EVENTS, Send
from ...http.headers import response_headers
from .call_record import CallRecord
from .call_response import closing_event, platform_headers
from .errors import HostSilent, ResponseTruncated, UpstreamDisconnected, UpstreamUnreachable
from .host_liveness import HostLiveness
from .retry_policy import is_billed_when_cut
from .stream_resume import ResumeMarkers
from .version_backend import Attempt, Worker

log = logging.getLogger(__name__)

MOVES_ALLOWED = 8
"""A stream that lost more workers ends: each had to compute all of its tokens again."""
_EVENT_STREAM = b"text/event-stream"
LATE_NS = 100_000_000
"""A worker that breaks off this close before the deadline keeps it by its own clock: the deadline is the reason."""


class StreamRelay:
    """The streamed response of one call, over all of its workers."""

    __slots__ = ("_final_status", "_lives", "_lost_ns", "_markers", "_moves", "_record", "_send")

    def __init__(
        self,
        record: CallRecord,
        send: Send,
        *,
        final_status: Callable[[WorkerId], Awaitable[WorkerStatus | None]],
        lives: Callable[[Worker], Awaitable[bool]],
    ) -> None:
        """`lives` asks a worker whether it still serves."""
        self._record = record
        self._send = send
        self._final_status = final_status
        self._lives = lives
        self._markers: ResumeMarkers | None = None
        """Markers of an event stream that another worker can continue; None if it cannot be continued."""
        self._lost_ns = 0
        self._moves = 0

    def resume_state(self) -> bytes:
        """The resume state for the next worker; empty before the stream has begun."""
        return self._markers.encode() if self._markers is not None else b""

    async def forward(self, attempt: Attempt, response: aiohttp.ClientResponse, liveness: HostLiveness) -> None:
        """Relays the response to its end.

        Errors: UpstreamError if another worker may continue it, else ResponseTruncated.
        """
        record = self._record
        head_ns = time.monotonic_ns()
        if record.begun:
            self._check_continues(response)
            record.continued(attempt, self._lost_ns, head_ns)
        else:
            await self._begin(attempt, response, head_ns)
        tail = b""
        try:
            while piece := await liveness.wait(response.content.readany()):
                if self._markers is not None:
                    piece = self._markers.feed(piece)
                tail = await self._forward_piece(piece, tail)
        except (aiohttp.ClientError, ConnectionError, HostSilent) as error:
            await self._on_lost_worker(attempt, head_ns, error)
        if self._markers is not None:
            tail = await self._forward_piece(self._markers.flush(), tail)
        record.responded(head_ns, time.monotonic_ns())
        record.release(waive=False)
        last = b""
        if record.events is not None:
            last = (b"" if tail in (b"\n\n", b"") else b"\n\n") + closing_event(record)
        record.finish()
        await self._send({"type": "http.response.body", "body": last, "more_body": False, OWN_EVENTS: True})

    def _check_continues(self, response: aiohttp.ClientResponse) -> None:
        """Errors: UpstreamUnreachable if the worker is draining; ResponseTruncated if it does not continue."""
        if response.status == 503:
            raise UpstreamUnreachable
        if response.status != 200 or CONTINUE_HEADER not in response.headers:
            raise ResponseTruncated(
                WorkerLost(
                    f"function {self._record.backend.key.name}: its worker was lost in mid-answer, and another one "
                    f"answered HTTP {response.status} instead of continuing"
                )
            )

    async def _begin(self, attempt: Attempt, response: aiohttp.ClientResponse, head_ns: int) -> None:
        record = self._record
        record.answered(attempt, response.status, response.headers.get(ERROR_HEADER, ""), head_ns)
        raw_type = response.headers.get("Content-Type", "").encode()
        events = raw_type.startswith(_EVENT_STREAM) and "Content-Encoding" not in response.headers
        if events and CONTINUE_HEADER in response.headers:
            self._markers = ResumeMarkers()
            if record.call.keyed is not None and record.call.keyed.partial:
                self._markers.give_up()
        headers = response_headers(response.raw_headers, root=record.call.root, keep_length=not events)
        headers += platform_headers(record)
        headers.append((b"server-timing", record.timeline.server_timing().encode()))
        record.response_started(events=events)
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})

    async def _forward_piece(self, piece: bytes, tail: bytes) -> bytes:
        """Forwards one piece.

        Returns the last two bytes sent, since an event's terminator may be split between two pieces.
        """
        if not piece:
            return tail
        if self._record.events is not None:
            self._record.count_events((tail[-1:] + piece).count(b"\n\n"))
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        return piece[-2:] if len(piece) > 1 else (tail + piece)[-2:]

    async def _on_lost_worker(self, attempt: Attempt, head_ns: int, error: Exception) -> NoReturn:
        """Errors: UpstreamDisconnected or HostSilent if the stream can continue elsewhere, else ResponseTruncated."""
        self._lost_ns = time.monotonic_ns()
        self._record.responded(head_ns, self._lost_ns)
        if self._markers is None or not self._markers.whole or self._moves >= MOVES_ALLOWED:
            silent = isinstance(error, HostSilent)
            status = None
            if silent or not await self._broken_off(attempt):
                status = await self._final_status(attempt.worker.id)
                failure: FleetError = self._lost_error(status, silent=silent)
            else:
                failure = HandlerFailed(
                    f"function {self._record.backend.key.name}: its handler broke off in mid-answer",
                    hint="the traceback is in the function's log",
                )
            billed = not silent and is_billed_when_cut(status)
            raise ResponseTruncated(failure, self._lost_ns if billed else None) from error
        self._moves += 1
        extra = {"invocation": self._record.call.id, "worker": attempt.worker.id, "error": str(error)}
        log.info("a stream continues at another worker", extra=extra)
        raise error if isinstance(error, HostSilent) else UpstreamDisconnected from error

    async def _broken_off(self, attempt: Attempt) -> bool:
        """Checks whether the worker lives, so that its handler has broken off. The end of a worker that drains, or of
        a call at its deadline, is not the handler's doing."""
        if self._record.call.deadline_ns - self._lost_ns < LATE_NS or not self._record.backend.serves(attempt.worker):
            return False
        return await self._lives(attempt.worker)

    def _lost_error(self, status: WorkerStatus | None, *, silent: bool) -> WorkerLost:
        cause = "its host does not answer" if silent else "the connection ended"
        if status is not None and status.error is not None:
            cause = status.error.message
        return WorkerLost(f"function {self._record.backend.key.name}: its worker was lost in mid-answer: {cause}")
