"""Sends what a handler gives, in the form that its type asks for: JSON, bytes, a `Response`, server-sent events.

Progress goes out as events before the answer, if the caller accepts event streams; the first of them decides that the
whole answer is a stream. A gateway that keeps the answer asks for progress apart from it (PROGRESS_HEADER): then the
answer comes in events, too, but as what it would have been without. A handler may report quicker than its caller reads:
then the latest report is what is sent.
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
from ..worker_io import user_errors as blame
from ..worker_io.asgi import JSON, ResponseAborted, Scope, Send, respond
from .result_encoding import Buffer, ResultEncoding

EVENTS = b"text/event-stream"
_EVENT_HEADERS = [(b"content-type", EVENTS), (b"cache-control", b"no-store")]
_PROGRESS = PROGRESS_HEADER.encode()
PIECE_BYTES = 48 * 1024
"""Of an answer in events: small enough to be found whole in a few reads."""
ProgressMode = Literal["no", "events", "apart"]


class ResponseWriter:
    def __init__(
        self, send: Send, call: CallState, outputs: ResultEncoding, bundle_dir: str, *, told: ProgressMode
    ) -> None:
        """`told`: not at all, to a caller who takes an event stream for an answer, or apart from the answer."""
        self._send = send
        self._call = call
        self._outputs = outputs
        self._bundle_dir = bundle_dir
        self._begun = False
        self._loop = asyncio.get_running_loop()
        self._reports: deque[tuple[float, str]] = deque(maxlen=1)
        self._teller: asyncio.Task[None] | None = None
        self._apart = told == "apart"
        self.complete = False
        if told != "no":
            call.on_progress = self._note

    # ── the answer ─────────────────────────────────────────────────────────────────────────────────

    async def value(self, result: Any) -> None:
        """Errors: InvalidOutput, TypeError: what was given has no such form."""
        status, content_type, headers, data = self._rendered(result)
        await self._tell_rest()
        if self._begun and self._apart:
            await self._answer(status, [(b"content-type", content_type), *headers])
            await self._piece(data)
            await self._end()
        elif self._begun:
            as_event = data if content_type == JSON else msgspec.json.encode(data)
            await self._event(1, as_event)
            await self._end()
        else:
            await respond(self._send, status, data, content_type, headers)
        self.complete = True

    def _rendered(self, result: Any) -> tuple[int, bytes, list[tuple[bytes, bytes]], bytes]:
        if isinstance(result, Response):
            default, data = _body_of(result, self._outputs)
            kind = result.content_type.encode("latin-1") or default
            return result.status, kind, result.raw_headers(), data
        shape = self._outputs.value
        if isinstance(result, Buffer) and (shape.is_bytes or shape.decoder is None):
            return 200, BYTES.encode(), [], bytes(result)
        return 200, JSON, [], shape.encode(result)

    async def events(self, items: AsyncIterator[Any]) -> None:
        """Errors: what the items raise before the first of them; later, it becomes an `error` event."""
        count = 0
        try:
            async for item in items:
                data = self._outputs.item.encode(item)
                if count == 0:
                    await self._tell_rest()
                    await self._begin()
                count += 1
                await self._event(count, data)
        except Exception as error:
            await self._tell_rest()
            if not self._begun:
                raise
            await self._body(self._failure(error))
        await self._begin()
        await self._tell_rest()
        await self._end()
        self.complete = True

    async def pieces(self, response: Response, pieces: AsyncIterator[Any]) -> None:
        """The body as it comes. Errors: of its first piece; CutOff later."""
        await self._tell_rest()
        if self._begun and not self._apart:
            raise TypeError("a call that has told its progress cannot give its body in pieces: return it whole")
        self._call.on_progress = None
        begun = False
        kind = response.content_type.encode("latin-1") or BYTES.encode()
        headers = [(b"content-type", kind), *response.raw_headers()]
        try:
            async for piece in pieces:
                data = _bytes_of(piece)
                if not begun:
                    await self._begin_pieces(response.status, headers)
                    begun = True
                await (self._piece(data) if self._begun else self._body(data))
        except Exception as error:
            if not begun:
                raise
            blame.log(error, f"call {self._call.id or '-'} failed in its body:")
            raise ResponseAborted from None
        if not begun:
            await self._begin_pieces(response.status, headers)
        await self._end()
        self.complete = True

    async def failed(self, error: Exception) -> None:
        """Of a call that has told its progress already. Errors: the same error, if nothing has been sent."""
        await self._tell_rest()
        if not self._begun or isinstance(error, ResponseAborted):
            raise error
        await self._body(self._failure(error))
        await self._end()
        self.complete = True

    def close(self) -> None:
        """Nothing more will be sent."""
        self._call.on_progress = None
        if self._teller is not None:
            self._teller.cancel()

    # ── progress ───────────────────────────────────────────────────────────────────────────────────

    def _note(self, fraction: float, message: str) -> None:
        """From any thread."""
        told_already = bool(self._reports)
        self._reports.append((fraction, message))
        if not told_already:
            self._loop.call_soon_threadsafe(self._begin_telling)

    def _begin_telling(self) -> None:
        if self._teller is None and self._reports and not self.complete:
            self._teller = self._loop.create_task(self._telling())

    async def _telling(self) -> None:
        try:
            while self._reports:
                fraction, message = self._reports.popleft()
                await self._begin()
                body = msgspec.json.encode({"fraction": fraction, "message": message})
                await self._body(b"event: progress\ndata: %b\n\n" % body)
        finally:
            self._teller = None

    async def _tell_rest(self) -> None:
        """What was reported so far goes out first, so that there is one writer at a time."""
        while (self._reports or self._teller is not None) and not self.complete:
            self._begin_telling()
            if self._teller is not None:
                await self._teller

    # ── the stream ─────────────────────────────────────────────────────────────────────────────────

    async def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            headers = [*_EVENT_HEADERS, (_PROGRESS, b"1")] if self._apart else _EVENT_HEADERS
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _begin_pieces(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if self._begun:
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
        await self._tell_rest()
        await self._body(b"id: %d\ndata: %b\n\n" % (number, data))

    async def _body(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _failure(self, error: Exception) -> bytes:
        blame.log(error, f"call {self._call.id or '-'} failed in its stream:")
        if isinstance(error, FleetError):
            info = error.info()
        else:
            info = HandlerFailed(blame.describe(error, self._bundle_dir)).info()
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(ErrorBody(error=info, request_id=self._call.id))


def progress_mode(scope: Scope) -> ProgressMode:
    if any(name == b"accept" and EVENTS in value.lower() for name, value in scope["headers"]):
        return "events"
    return "apart" if any(name == _PROGRESS for name, _ in scope["headers"]) else "no"


def _body_of(response: Response, outputs: ResultEncoding) -> tuple[bytes, bytes]:
    """Its content type where none was given, and its bytes."""
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
