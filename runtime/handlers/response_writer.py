"""Writes the response of a handler: JSON, bytes, a `Response`, or server-sent events.

If the caller accepts event streams, progress is sent as events before the result; the first one makes the whole
response a stream. A gateway that stores the response asks for separate progress (PROGRESS_HEADER): then the original
response is sent inside events. If a handler reports faster than its caller reads, only the latest report is sent.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec

from ..contract.errors import ErrorBody, FleetError, HandlerFailed
from ..contract.worker_headers import PROGRESS_HEADER, AnswerHead
from ..sdk.context import CallState
from ..sdk.responses import BYTES, TEXT, Response
from ..worker_io import user_errors
from ..worker_io.asgi import JSON, ResponseAborted, Scope, Send, respond
from ..worker_io.callee_errors import as_seen_outside
from .result_encoding import Buffer, ResultEncoding

EVENTS = b"text/event-stream"
_EVENT_HEADERS = [(b"content-type", EVENTS), (b"cache-control", b"no-store")]
_PROGRESS = PROGRESS_HEADER.encode()
PIECE_BYTES = 48 * 1024
"""Size of a piece of a response that is sent inside events: whole in a few reads."""
ProgressMode = Literal["none", "events", "separate"]


class ResponseWriter:
    """Writes one call's response and its progress reports."""

    def __init__(
        self, send: Send, call: CallState, outputs: ResultEncoding, bundle_dir: str, *, progress: ProgressMode
    ) -> None:
        """`progress`: not reported, as events of the response stream, or separate from the response."""
        self._send = send
        self._call = call
        self._outputs = outputs
        self._bundle_dir = bundle_dir
        self._started = False
        self._loop = asyncio.get_running_loop()
        self._reports: deque[tuple[float, str]] = deque(maxlen=1)
        self._progress_task: asyncio.Task[None] | None = None
        self._separate = progress == "separate"
        self.complete = False
        if progress != "none":
            call.on_progress = self._on_report

    # ── the answer ─────────────────────────────────────────────────────────────────────────────────

    async def value(self, result: Any) -> None:
        """Sends a result as the whole response. Errors: InvalidOutput, TypeError if it cannot be encoded."""
        status, content_type, headers, data = self._render(result)
        await self._flush_progress()
        if self._started and self._separate:
            await self._answer(status, [(b"content-type", content_type), *headers])
            await self._piece(data)
            await self._end()
        elif self._started:
            as_event = data if content_type == JSON else msgspec.json.encode(data)
            await self._event(1, as_event)
            await self._end()
        else:
            await respond(self._send, status, data, content_type, headers)
        self.complete = True

    def _render(self, result: Any) -> tuple[int, bytes, list[tuple[bytes, bytes]], bytes]:
        if isinstance(result, Response):
            default, data = _body_of(result, self._outputs)
            kind = result.content_type.encode("latin-1") or default
            return result.status, kind, result.raw_headers(), data
        shape = self._outputs.value
        if isinstance(result, Buffer) and (shape.is_bytes or shape.decoder is None):
            return 200, BYTES.encode(), [], bytes(result)
        return 200, JSON, [], shape.encode(result)

    async def events(self, items: AsyncIterator[Any]) -> None:
        """Sends items as server-sent events. Errors: those before the first item; later an `error` event is sent."""
        count = 0
        try:
            async for item in items:
                data = self._outputs.item.encode(item)
                if count == 0:
                    await self._flush_progress()
                    await self._start()
                count += 1
                await self._event(count, data)
        except Exception as error:
            await self._flush_progress()
            if not self._started:
                raise
            await self._body(self._failure(error))
        await self._start()
        await self._flush_progress()
        await self._end()
        self.complete = True

    async def pieces(self, response: Response, pieces: AsyncIterator[Any]) -> None:
        """Sends a `Response` whose body is an iterator. Errors: those before the first piece; later ResponseAborted."""
        await self._flush_progress()
        if self._started and not self._separate:
            raise TypeError("a call that has reported progress cannot stream a Response body: return the body whole")
        self._call.on_progress = None
        begun = False
        kind = response.content_type.encode("latin-1") or BYTES.encode()
        headers = [(b"content-type", kind), *response.raw_headers()]
        try:
            async for piece in pieces:
                data = _bytes_of(piece)
                if not begun:
                    await self._start_pieces(response.status, headers)
                    begun = True
                await (self._piece(data) if self._started else self._body(data))
        except Exception as error:
            if not begun:
                raise
            user_errors.log(error, f"call {self._call.id or '-'} failed in its body:")
            raise ResponseAborted from None
        if not begun:
            await self._start_pieces(response.status, headers)
        await self._end()
        self.complete = True

    async def failed(self, error: Exception) -> None:
        """Sends an error of a call that has reported progress. Errors: the same error, if nothing was sent."""
        await self._flush_progress()
        if not self._started or isinstance(error, ResponseAborted):
            raise error
        await self._body(self._failure(error))
        await self._end()
        self.complete = True

    def close(self) -> None:
        """Stops sending progress."""
        self._call.on_progress = None
        if self._progress_task is not None:
            self._progress_task.cancel()

    # ── progress ───────────────────────────────────────────────────────────────────────────────────

    def _on_report(self, fraction: float, message: str) -> None:
        """Receives a progress report, from any thread."""
        pending = bool(self._reports)
        self._reports.append((fraction, message))
        if not pending:
            self._loop.call_soon_threadsafe(self._start_progress)

    def _start_progress(self) -> None:
        if self._progress_task is None and self._reports and not self.complete:
            self._progress_task = self._loop.create_task(self._send_progress())

    async def _send_progress(self) -> None:
        try:
            while self._reports:
                fraction, message = self._reports.popleft()
                await self._start()
                body = msgspec.json.encode({"fraction": fraction, "message": message})
                await self._body(b"event: progress\ndata: %b\n\n" % body)
        finally:
            self._progress_task = None

    async def _flush_progress(self) -> None:
        """Sends pending progress first, so that there is one writer at a time."""
        while (self._reports or self._progress_task is not None) and not self.complete:
            self._start_progress()
            if self._progress_task is not None:
                await self._progress_task

    # ── the stream ─────────────────────────────────────────────────────────────────────────────────

    async def _start(self) -> None:
        if not self._started:
            self._started = True
            headers = [*_EVENT_HEADERS, (_PROGRESS, b"1")] if self._separate else _EVENT_HEADERS
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _start_pieces(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if self._started:
            await self._answer(status, headers)
        else:
            await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _answer(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        named = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        head = AnswerHead(status=status, headers=named)
        await self._body(b"event: answer\ndata: %b\n\n" % msgspec.json.encode(head))

    async def _piece(self, data: bytes) -> None:
        for begin in range(0, len(data), PIECE_BYTES):
            piece = b64encode(memoryview(data)[begin : begin + PIECE_BYTES])
            await self._body(b"event: piece\ndata: %b\n\n" % piece)

    async def _event(self, number: int, data: bytes) -> None:
        await self._flush_progress()
        await self._body(b"id: %d\ndata: %b\n\n" % (number, data))

    async def _body(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _failure(self, error: Exception) -> bytes:
        user_errors.log(error, f"call {self._call.id or '-'} failed in its stream:")
        if isinstance(error, FleetError):
            shown = as_seen_outside(error)
        else:
            shown = HandlerFailed(user_errors.describe(error, self._bundle_dir))
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(ErrorBody.of(shown, self._call.id))


def progress_mode(scope: Scope) -> ProgressMode:
    """How the caller wants progress, by its request headers."""
    if any(name == b"accept" and EVENTS in value.lower() for name, value in scope["headers"]):
        return "events"
    return "separate" if any(name == _PROGRESS for name, _ in scope["headers"]) else "none"


def _body_of(response: Response, outputs: ResultEncoding) -> tuple[bytes, bytes]:
    """Default content type and bytes of a response's body."""
    body = response.body
    if isinstance(body, Buffer):
        return BYTES.encode(), bytes(body)
    if isinstance(body, str):
        return TEXT.encode(), body.encode()
    return JSON, outputs.value.encode(body)


def _bytes_of(piece: Any) -> bytes:
    if isinstance(piece, Buffer):
        return bytes(piece)
    if isinstance(piece, str):
        return piece.encode()
    raise TypeError(f"a Response's body gave a {type(piece).__name__}: its pieces must be bytes or text")
