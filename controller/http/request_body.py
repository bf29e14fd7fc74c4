"""Reads a request's body into memory, up to the size limit.

A body that is too large is rejected before it is read if its Content-Length says so, else as soon as it is. Its sender
is still writing then: the response goes out first, and what follows is discarded for a moment, because closing at once
would reset the connection and lose the response.
"""

from __future__ import annotations

import asyncio
import contextlib

from fleetstart.runtime.contract.errors import FleetError, TooLarge
from fleetstart.runtime.contract.sizes import MIB

from .asgi import Receive, Scope, Send, respond_error
from .body_budget import HeldBody

LINGER_S = 2.0
LINGER_BYTES = 64 * MIB
SMALL_BYTES = 64 * 1024
"""Bodies up to this come with their head, or nearly: a client that is often rejected keeps its connection."""


class ClientDisconnected(Exception):
    """The client disconnected before its request was complete."""


def header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def declared_bytes(scope: Scope) -> int:
    text = header(scope, b"content-length") or b"0"
    return int(text) if text.isdigit() else 0


def too_large(limit_bytes: int, *, own: bool = False) -> TooLarge:
    """`own`: whether the limit is the function's and not the gateway's."""
    return TooLarge(
        f"the request's body has more than the {limit_bytes} bytes that are allowed",
        hint=f"send a reference to the data instead, or raise {'`max_body` of the function' if own else 'FS_MAX_BODY'}",
    )


async def read_body(
    scope: Scope, receive: Receive, limit_bytes: int, *, held: HeldBody | None = None, own: bool = False
) -> bytes:
    """Reads the whole body. `held` counts it as it arrives. Errors: TooLarge, QueueFull, ClientDisconnected."""
    if declared_bytes(scope) > limit_bytes:
        raise too_large(limit_bytes, own=own)
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnected
    first: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(first) > limit_bytes:
            raise too_large(limit_bytes, own=own)
        if held is not None:
            held.grow_to(len(first))
        return first
    body = bytearray(first)
    while True:
        if len(body) > limit_bytes:
            raise too_large(limit_bytes, own=own)
        if held is not None:
            held.grow_to(len(body))
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    if len(body) > limit_bytes:
        raise too_large(limit_bytes, own=own)
    if held is not None:
        held.grow_to(len(body))
    return bytes(body)


async def reject_unread(scope: Scope, receive: Receive, send: Send, error: FleetError, request_id: str) -> None:
    """Rejects a request whose body was not read to its end. Closes the connection, unless the rest of it is small."""
    # A client with Expect: 100-continue may send its body or not: only the connection's end is clear to both.
    unclear = header(scope, b"transfer-encoding") is not None or header(scope, b"expect") is not None
    small = not unclear and declared_bytes(scope) <= SMALL_BYTES
    await respond_error(send, error, request_id, [] if small else [(b"connection", b"close")], more=True)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            await _discard(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    left_bytes = LINGER_BYTES
    while left_bytes > 0:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        left_bytes -= len(message.get("body", b""))
