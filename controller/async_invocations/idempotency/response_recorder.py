"""Response recorder: forwards a response to the client and keeps a copy up to a size limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ...http.asgi import NO_CONTENT, Message, RawHeaders, Receive, Send
from ...state.invocation_records import Answer

ANSWER_BYTES = 1 << 20
"""Maximum size of a stored synchronous response; larger ones are forwarded and not stored."""
_NOT_KEPT = frozenset((b"content-length", b"connection", b"transfer-encoding", b"date"))


class ResponseRecorder:
    """An ASGI `send` that records. The last piece is sent after `on_end`: a complete response implies its effects."""

    def __init__(self, send: Send, limit_bytes: int, on_end: Callable[[], Awaitable[None]]) -> None:
        self._send = send
        self._limit_bytes = limit_bytes
        self._on_end = on_end
        self.status = 0
        self.ran = False
        """True if a worker got the call."""
        self.whole = False
        self.too_large = False
        self.headers: RawHeaders = []
        self.body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = list(message.get("headers", ()))
            self.ran = any(name == b"fs-start" for name, _ in self.headers)
        else:
            piece = message.get("body", b"")
            self.too_large = self.too_large or len(self.body) + len(piece) > self._limit_bytes
            if self.too_large:
                self.body.clear()
            else:
                self.body += piece
            if not message.get("more_body", False):
                self.whole = True
                await self._on_end()
        await self._send(message)

    @property
    def worth_keeping(self) -> bool:
        """Checks whether later calls should get this response: the handler gave it, and it is neither a failure (5xx)
        nor a retryable rejection (402, 425, 429)."""
        return self.ran and self.status < 500 and self.status not in (402, 408, 409, 425, 429)

    def answer(self) -> Answer:
        return Answer(
            claim=1,
            http_status=self.status,
            headers=[
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in self.headers
                if name not in _NOT_KEPT
            ],
            body_bytes=len(self.body),
            content_type=self._header(b"content-type"),
            billed_ms=int(self._header(b"fs-billed-ms") or 0),
            cost=self._header(b"fs-cost"),
            version=int(self._header(b"fs-version") or 0),
            start=self._header(b"fs-start"),
        )

    def _header(self, name: bytes) -> str:
        return next((value.decode("latin-1") for key, value in self.headers if key == name), "")


async def send_answer(send: Send, answer: Answer, body: bytes, extra: RawHeaders) -> None:
    headers: RawHeaders = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    replaced = {name for name, _ in extra}
    headers = [(name, value) for name, value in headers if name not in replaced]
    headers += extra
    if answer.http_status in NO_CONTENT:
        body = b""
    else:
        headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": answer.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def replay_receive(body: bytes, gone: asyncio.Event) -> Receive:
    """An ASGI `receive` that gives the body at once, and a disconnect when `gone` is set."""
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    return receive
