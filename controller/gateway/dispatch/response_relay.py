"""A worker's answer on its way to the caller: small ones whole, so that the bill stands in their headers, others as
they come. A stream with marks that breaks off can go on at another worker (`marks`); all others that had begun are cut.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

import aiohttp

from fleetstart.runtime.contract.errors import FleetError, WorkerLost
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.orders import WorkerStatus
from fleetstart.runtime.contract.worker_headers import BUSY_HEADER, CONTINUE_HEADER, DRAINING_HEADER, ERROR_HEADER

from ...http.asgi import RawHeaders, Send, bill_headers, closing_event
from ...http.headers import response_headers
from .backend import Call, VersionBackend, Worker
from .call_summary import bill, cost, platform_headers
from .host_liveness import HostLiveness, HostSilent
from .slots import SlotAcquirer
from .stream_resume import ResumeMarkers
from .upstream import UpstreamBusy, UpstreamDisconnected, UpstreamUnreachable, read

log = logging.getLogger(__name__)

MOVES_ALLOWED = 8
"""A stream that lost more workers ends: each had to compute all of its tokens anew."""
BUFFERED_BYTES = 1 << 20
"""Answers up to this are read before they are passed on: the bill is exact, and a worker's death can be mended."""
_EVENT_STREAM = b"text/event-stream"


class ResponseTruncated(Exception):
    """The answer had begun and cannot go on."""

    def __init__(self, error: FleetError) -> None:
        self.error = error


class ResponseRelay:
    def __init__(
        self,
        slots: SlotAcquirer,
        *,
        record: Callable[[VersionBackend, Call], None],
        final_status: Callable[[WorkerId], Awaitable[WorkerStatus | None]],
    ) -> None:
        self._slots = slots
        self._record = record
        self._final_status = final_status

    async def forward(
        self,
        backend: VersionBackend,
        call: Call,
        worker: Worker,
        response: aiohttp.ClientResponse,
        watch: HostLiveness,
        send: Send,
    ) -> None:
        """Errors: UpstreamBusy if the worker ran nothing; UpstreamDisconnected or HostSilent if a retry is allowed;
        else ResponseTruncated."""
        headers = response.headers
        if response.status == 503 and (BUSY_HEADER in headers or DRAINING_HEADER in headers):
            await watch.wait(read(response))
            raise UpstreamBusy
        if call.begun:
            self._check_continues(backend, response)
            await self._stream(backend, call, worker, response, watch, send)
            return
        call.status = response.status
        call.error = headers.get(ERROR_HEADER, "")
        if self._fits_buffer(call, response):
            body = await watch.wait(read(response))
            await self._send_buffered(backend, call, worker, response, body, send)
        else:
            await self._stream(backend, call, worker, response, watch, send)

    def _check_continues(self, backend: VersionBackend, response: aiohttp.ClientResponse) -> None:
        """Errors: UpstreamUnreachable if the worker is draining; ResponseTruncated if it does not continue."""
        if response.status == 503:
            raise UpstreamUnreachable
        if response.status != 200 or CONTINUE_HEADER not in response.headers:
            raise ResponseTruncated(
                WorkerLost(
                    f"function {backend.key.name}: its worker was lost in mid-answer, and another one answered "
                    f"HTTP {response.status} instead of going on with it"
                )
            )

    def _fits_buffer(self, call: Call, response: aiohttp.ClientResponse) -> bool:
        if call.method == "HEAD" or response.status in (204, 304):
            return True
        length = response.headers.get("Content-Length", "")
        return length.isdecimal() and int(length) <= BUFFERED_BYTES

    async def _send_buffered(
        self,
        backend: VersionBackend,
        call: Call,
        worker: Worker,
        response: aiohttp.ClientResponse,
        body: bytes,
        send: Send,
    ) -> None:
        now_ns = time.monotonic_ns()
        self._slots.record_queue_phase(call, worker)
        call.timeline.add("execute", call.dispatched_ns, now_ns)
        call.billed_ms = backend.release(call, now_ns, waive=False)
        headers = self._head(backend, call, worker, response, keep_length=True)
        headers += bill_headers(call.billed_ms, cost(backend, call), call.timeline.server_timing())
        call.begun = True
        self._record(backend, call)
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _stream(
        self,
        backend: VersionBackend,
        call: Call,
        worker: Worker,
        response: aiohttp.ClientResponse,
        watch: HostLiveness,
        send: Send,
    ) -> None:
        """Each piece goes out when it has come in; a slow reader slows its worker down, and nothing piles up here."""
        head_ns = time.monotonic_ns()
        if call.begun:
            self._slots.record_move_phase(call, worker, head_ns)
        else:
            await self._begin_stream(backend, call, worker, response, head_ns, send)
        tail = b""
        try:
            while piece := await watch.wait(response.content.readany()):
                if call.marks is not None:
                    piece = call.marks.feed(piece)
                tail = await self._forward_piece(call, piece, tail, send)
        except (aiohttp.ClientError, ConnectionError, HostSilent) as error:
            await self._on_lost_stream(backend, call, worker, head_ns, error)
        if call.marks is not None:
            tail = await self._forward_piece(call, call.marks.rest(), tail, send)
        self._close_stream(backend, call, head_ns)
        last = b""
        if call.events:
            last = (b"" if tail in (b"\n\n", b"") else b"\n\n") + closing_event(bill(backend, call, worker))
        self._record(backend, call)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _begin_stream(
        self,
        backend: VersionBackend,
        call: Call,
        worker: Worker,
        response: aiohttp.ClientResponse,
        head_ns: int,
        send: Send,
    ) -> None:
        self._slots.record_queue_phase(call, worker)
        call.timeline.add("execute", call.dispatched_ns, head_ns)
        raw_type = response.headers.get("Content-Type", "").encode()
        call.events = raw_type.startswith(_EVENT_STREAM) and "Content-Encoding" not in response.headers
        if call.events and CONTINUE_HEADER in response.headers:
            call.marks = ResumeMarkers()
        headers = self._head(backend, call, worker, response, keep_length=not call.events)
        headers.append((b"server-timing", call.timeline.server_timing().encode()))
        call.begun = True
        await send({"type": "http.response.start", "status": response.status, "headers": headers})

    async def _forward_piece(self, call: Call, piece: bytes, tail: bytes, send: Send) -> bytes:
        """Forwards one piece.

        Returns the last two bytes sent, since an event's terminator may be split between two pieces."""
        if not piece:
            return tail
        if call.events:
            call.event_count += (tail[-1:] + piece).count(b"\n\n")
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        return piece[-2:] if len(piece) > 1 else (tail + piece)[-2:]

    async def _on_lost_stream(
        self, backend: VersionBackend, call: Call, worker: Worker, head_ns: int, error: Exception
    ) -> NoReturn:
        """Errors: UpstreamDisconnected or HostSilent if the stream can go on elsewhere, else ResponseTruncated."""
        call.lost_ns = time.monotonic_ns()
        call.timeline.add("respond", head_ns, call.lost_ns)
        if call.marks is None or not call.marks.whole or call.moves >= MOVES_ALLOWED:
            raise ResponseTruncated(await self._lost_error(backend, worker, error)) from error
        call.moves += 1
        log.info("a stream goes on elsewhere", extra={"invocation": call.id, "worker": worker.id, "error": str(error)})
        raise error if isinstance(error, HostSilent) else UpstreamDisconnected from error

    async def _lost_error(self, backend: VersionBackend, worker: Worker, error: Exception) -> FleetError:
        status = await self._final_status(worker.id)
        cause = "its host does not answer" if isinstance(error, HostSilent) else "the connection ended"
        if status is not None and status.error is not None:
            cause = status.error.message
        return WorkerLost(f"function {backend.key.name}: its worker was lost in mid-answer: {cause}")

    def _close_stream(self, backend: VersionBackend, call: Call, head_ns: int) -> None:
        now_ns = time.monotonic_ns()
        call.timeline.add("respond", head_ns, now_ns)
        call.billed_ms = backend.release(call, now_ns, waive=False)

    def _head(
        self,
        backend: VersionBackend,
        call: Call,
        worker: Worker,
        response: aiohttp.ClientResponse,
        *,
        keep_length: bool,
    ) -> RawHeaders:
        headers = response_headers(response.raw_headers, keep_length=keep_length)
        headers += platform_headers(backend, call, worker)
        return headers
