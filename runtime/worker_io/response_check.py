"""Checks an app's response before the server gets it: a mistake becomes an error that names it.

The server would find it when a part is sent, and could only close the connection, which looks like a worker that died.
A response with a Content-Length that the gateway reads whole before it answers is sent when it is whole, so that a
wrong length, and an app that raises in the middle, are errors and not a connection that ends. A larger one is begun
with its first piece. What a response without content has of one is dropped, as its reader would take it for the next
response.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from ..contract.errors import InvalidOutput
from ..contract.worker_headers import BUFFERED_BYTES
from .asgi import Headers, Message, Receive, Scope, Send

HEADERS_MAX = 100
HEADERS_MAX_BYTES = 60 * 1024
"""The gateway's client reads no more than 128 headers, and none of more than 64 KiB."""
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_NO_CONTENT = (204, 304)
_FRAMING = (b"content-length", b"transfer-encoding")


class CheckedResponse:
    """The response of one call, as the app sends it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._is_head = scope.get("method") == "HEAD"
        self._held: Message | None = None
        """Its start, while nothing of it has been sent."""
        self._held_body = bytearray()
        """The part that has come of a body that is sent whole."""
        self._length: int | None = None
        """Content-Length of a response whose body is counted."""
        self._sent_bytes = 0
        self._empty = False
        self._complete = False
        self._disconnected = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._disconnected = self._disconnected or message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        """Errors: InvalidOutput."""
        if message["type"] == "http.response.start":
            await self._start(message)
        elif message["type"] == "http.response.body":
            await self._body(message)
        else:
            await self._send(message)

    async def require_complete(self) -> None:
        """Errors: InvalidOutput, if the app returned early, though its client was there."""
        if not self._complete and not self._disconnected and not await self._has_left():
            raise InvalidOutput("the app returned before its response was complete")

    async def _has_left(self) -> bool:
        """Checks whether the client has left, of which an app that does not ask hears nothing."""
        try:
            async with asyncio.timeout(0):
                while not self._disconnected:
                    await self.receive()
        except TimeoutError:
            return False
        return True

    async def _start(self, message: Message) -> None:
        status = message.get("status")
        if isinstance(status, bool) or not isinstance(status, int) or not 200 <= status <= 599:
            raise InvalidOutput(f"the app answered with status {status!r}: it must be 200 to 599")
        headers = _checked_headers(message.get("headers", ()))
        self._empty = status in _NO_CONTENT
        lengths = [value for name, value in headers if name.lower() == b"content-length"]
        framing = _FRAMING if self._empty else _FRAMING[1:]
        message = {**message, "headers": [pair for pair in headers if pair[0].lower() not in framing]}
        if self._empty or not lengths:
            await self._send(message)
            return
        if len(lengths) > 1 or not lengths[0].isdigit():
            raise InvalidOutput(f"the app's response has the Content-Length {b', '.join(lengths).decode('latin-1')!r}")
        if self._is_head:
            await self._send(message)
            return
        self._length, self._held = int(lengths[0]), message

    async def _body(self, message: Message) -> None:
        if self._empty:
            message = {**message, "body": b""}
        last = not message.get("more_body", False)
        if self._length is not None:
            self._sent_bytes += len(message.get("body", b""))
            if self._sent_bytes > self._length or (last and self._sent_bytes < self._length):
                raise InvalidOutput(
                    f"the app's response has {self._sent_bytes} bytes{'' if last else ' or more'}, "
                    f"and a Content-Length of {self._length}"
                )
        if self._held is not None:
            if self._length is not None and self._length <= BUFFERED_BYTES:
                self._held_body += message.get("body", b"")
                if not last:
                    return
                message = {**message, "body": bytes(self._held_body)}
            held, self._held = self._held, None
            await self._send(held)
        await self._send(message)
        self._complete = self._complete or last


def _checked_headers(headers: Any) -> Headers:
    """Errors: InvalidOutput."""
    pairs: Headers = []
    size_bytes = 0
    for name, value in headers:
        if not isinstance(name, bytes) or not isinstance(value, bytes):
            raise InvalidOutput(f"the app's response has a header that is not bytes: {name!r}")
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise InvalidOutput(f"the app's response has a header that HTTP does not allow: {name!r}: {value[:80]!r}")
        pairs.append((name, value))
        size_bytes += len(name) + len(value)
    if len(pairs) > HEADERS_MAX or size_bytes > HEADERS_MAX_BYTES:
        raise InvalidOutput(
            f"the app's response has {len(pairs)} headers of {size_bytes} bytes; "
            f"{HEADERS_MAX} of {HEADERS_MAX_BYTES} bytes are allowed"
        )
    return pairs
