"""Kept answers of a worker: calls that outlive the gateway that sent them.

A call that was sent with an idempotency key runs in a task of its own, whatever becomes of its connection. The worker
keeps its answer from the first byte on, also while it is a stream that has not ended, and another gateway that attaches
with the call's id reads it all again. Readers hold the handler back as a connection would. A call whose answer nobody
reads is ended after a while; an answer that has ended is kept for as long, for a gateway that died before it had
written the answer down.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections import OrderedDict

from ..contract.errors import WorkerLost
from ..contract.worker_headers import END_HEADER, REQUEST_HEADER, STREAM_HEADER, TOKEN_HEADER
from ..worker_io.asgi import (
    App,
    ClientDisconnected,
    Message,
    Receive,
    ResponseAborted,
    Scope,
    Send,
    read_body,
    respond_error,
)

KEPT_BYTES = 1 << 20
"""Most bytes kept of one answer, some thousand tokens. Of a longer one, what readers have read is dropped."""
ALL_KEPT_BYTES = 4 << 20
"""Most bytes kept of answers that have ended; the oldest are dropped. They count in the function's memory."""
AHEAD_BYTES = 256 << 10
"""How far a handler may be ahead of its fastest reader, and goes on while nobody reads."""
CUT_AFTER_S = 0.05
"""Pause before an answer is cut where its handler was. A gateway's HTTP client drops what it has received and not
handed on when the connection ends, and here all of an answer may go out at once."""
UNREAD_S = 30.0
"""How long a call goes on, or its answer is kept, without a reader: as long as a dead gateway's call is left open."""

SEEN_MAX = 10_000
"""Number of calls of which the worker knows that it had them: of others a gateway knows that they never ran here."""

_TOKEN, _REQUEST, _STREAM = (name.encode() for name in (TOKEN_HEADER, REQUEST_HEADER, STREAM_HEADER))
_END = END_HEADER.encode()


class AnswerGone(WorkerLost):
    """The worker has no such answer, or not from its first byte on."""


class KeptAnswer:
    """The answer of one call, and its readers."""

    def __init__(self, body: bytes) -> None:
        self.whole = True
        """All of its pieces are there, from the first on."""
        self.ended_s = 0.0
        """When it ended (monotonic); 0 before."""
        self.size_bytes = 0
        self.gone = asyncio.Event()
        """Set when the app shall see that its client has disconnected."""
        self.readers: dict[object, int] = {}
        """The number of the piece that each reads next."""
        self._body: bytes | None = body
        self._head: Message | None = None
        self._pieces: list[bytes] = []
        self._dropped = 0
        """Number of pieces that are not kept any more."""
        self._ahead_bytes = 0
        """Bytes that no reader has read."""
        self._read = 0
        """Number of pieces that some reader has read."""
        self._aborted = False
        self._changed = asyncio.Condition()

    async def receive(self) -> Message:
        """The app's `receive`."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def write(self, message: Message) -> None:
        """The app's `send`."""
        if message["type"] == "http.response.start":
            own = [pair for pair in message.get("headers", ()) if pair[0].lower() != _STREAM]
            self._head = {**message, "headers": own}
        async with self._changed:
            if piece := message.get("body", b""):
                self._pieces.append(piece)
                self.size_bytes += len(piece)
                self._ahead_bytes += len(piece)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._ahead_bytes <= AHEAD_BYTES or self.gone.is_set())

    async def end(self, *, aborted: bool) -> None:
        async with self._changed:
            self.ended_s, self._aborted = time.monotonic(), aborted
            self._changed.notify_all()

    async def abandon(self) -> None:
        async with self._changed:
            self.gone.set()
            self._changed.notify_all()

    async def read(self, send: Send) -> None:
        """Sends the whole answer. Errors: ResponseAborted."""
        me = object()
        self.readers[me] = 0
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._head is not None or self.ended_s)
            if self._head is not None:
                await send(self._head)
            while (piece := await self._next(me)) is not None:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            del self.readers[me]
        if self._aborted:
            await asyncio.sleep(CUT_AFTER_S)
            raise ResponseAborted
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self, me: object) -> bytes | None:
        async with self._changed:
            number = self.readers[me]
            await self._changed.wait_for(lambda: number < self._dropped + len(self._pieces) or self.ended_s)
            if number >= self._dropped + len(self._pieces):
                return None
            piece = self._pieces[number - self._dropped]
            self.readers[me] = number + 1
            if number >= self._read:
                self._read = number + 1
                self._ahead_bytes -= len(piece)
                self._changed.notify_all()
            if self.size_bytes > KEPT_BYTES:
                self._drop_read()
            return piece

    def _drop_read(self) -> None:
        """Drops what all readers have read: the answer is too long to be kept whole."""
        self.whole = False
        unneeded = min(self.readers.values()) - self._dropped
        del self._pieces[:unneeded]
        self._dropped += unneeded


class KeptAnswers:
    """ASGI middleware in front of a worker's call gate, for calls with STREAM_HEADER."""

    def __init__(self, app: App, *, token: str, unread_s: float = UNREAD_S) -> None:
        self._app = app
        self._token = token.encode()
        self._unread_s = unread_s
        self._answers: OrderedDict[str, KeptAnswer] = OrderedDict()
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        token, request, wanted = _headers(scope)
        if not wanted or not hmac.compare_digest(token, self._token):
            await self._app(scope, receive, send)  # which refuses a wrong token
        elif any(name == _END for name, _ in scope["headers"]):
            await self._app(scope, receive, send)  # which knows what runs
        elif wanted == b"attach":
            await self._attach(request, receive, send)
        else:
            await self._begin(scope, request, receive, send)

    async def _begin(self, scope: Scope, request: str, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive)
        except ClientDisconnected:
            return
        answer = KeptAnswer(body)
        self._drop_old()
        self._seen[request] = None
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        self._answers.pop(request, None)
        self._answers[request] = answer
        running = asyncio.get_running_loop().create_task(self._run(scope, answer))
        self._tasks.add(running)
        running.add_done_callback(self._tasks.discard)
        await self._read(answer, receive, send)

    async def _run(self, scope: Scope, answer: KeptAnswer) -> None:
        aborted = True
        try:
            await self._app(scope, answer.receive, answer.write)
            aborted = False
        except ResponseAborted:
            pass  # it is logged already; the readers' connections end in the middle
        finally:
            await answer.end(aborted=aborted)

    async def _attach(self, request: str, receive: Receive, send: Send) -> None:
        self._drop_old()
        answer = self._answers.get(request)
        if answer is None or not answer.whole:
            why = "is not kept here" if answer is None else "is too long to be read again from its first byte"
            error = AnswerGone(f"the answer of call {request} {why}")
            found = b"gone" if request in self._seen else b"unknown"
            await respond_error(send, error, request, [(_STREAM, found)])
            return
        await self._read(answer, receive, send)

    async def _read(self, answer: KeptAnswer, receive: Receive, send: Send) -> None:
        """Sends the answer until it ends or its reader disconnects. Errors: ResponseAborted."""
        reading = asyncio.ensure_future(answer.read(send))
        leaving = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        finally:
            leaving.cancel()
            await _cancel(reading)
            if not answer.readers and not answer.ended_s:
                asyncio.get_running_loop().call_later(self._unread_s, self._abandon_unread, answer)

    def _abandon_unread(self, answer: KeptAnswer) -> None:
        if not answer.readers and not answer.ended_s:
            task = asyncio.get_running_loop().create_task(answer.abandon())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _drop_old(self) -> None:
        """Forgets answers that ended long ago, and the oldest of those that are too many bytes together."""
        since_s = time.monotonic() - self._unread_s
        ended = [
            (request, answer) for request, answer in self._answers.items() if answer.ended_s and not answer.readers
        ]
        total = sum(answer.size_bytes for _, answer in ended)
        for request, answer in ended:
            if answer.ended_s > since_s and total <= ALL_KEPT_BYTES:
                continue
            total -= answer.size_bytes
            del self._answers[request]


async def _cancel(task: asyncio.Future[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, ResponseAborted):
        await task


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _headers(scope: Scope) -> tuple[bytes, str, bytes]:
    found = {name: value for name, value in scope["headers"] if name in (_TOKEN, _REQUEST, _STREAM)}
    return found.get(_TOKEN, b""), found.get(_REQUEST, b"").decode("latin-1"), found.get(_STREAM, b"")
