"""ASGI types, and helpers to read whole bodies and to send whole responses and errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from ..contract.errors import ErrorBody, FleetError
from ..contract.worker_headers import ERROR_HEADER, retry_headers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON = b"application/json"


class ClientDisconnected(Exception):
    """The client disconnected before its request was complete."""


class ResponseAborted(Exception):
    """Raised into the server to close the connection in the middle of a response; the error is logged already."""


async def read_body(receive: Receive) -> bytes:
    """Reads the whole request body. Errors: ClientDisconnected."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def respond(send: Send, status: int, body: bytes, content_type: bytes, headers: Headers | None = None) -> None:
    """Sends a whole response."""
    sized = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": sized + (headers or [])})
    await send({"type": "http.response.body", "body": body})


async def respond_error(send: Send, error: FleetError, request: str, headers: Headers | None = None) -> None:
    """Sends an error response, marked as one of the platform."""
    body = msgspec.json.encode(ErrorBody.of(error, request))
    marked = [(ERROR_HEADER.encode(), error.code.encode()), *retry_headers(error), *(headers or [])]
    await respond(send, error.status, body, JSON, marked)
