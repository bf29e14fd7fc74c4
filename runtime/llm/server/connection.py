"""Connection of one call: its body, its deadline, and work that ends when its client disconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from ...contract.errors import TooLarge
from ...contract.worker_headers import DEADLINE_HEADER
from ...worker_io.asgi import ClientDisconnected, Receive, Scope

BODY_MAX_BYTES = 8 * 1024 * 1024
"""Far more text than any context holds."""
Result = TypeVar("Result")


def deadline_ns(scope: Scope) -> int | None:
    """The call's deadline on the monotonic clock; None without one."""
    for name, value in scope["headers"]:
        if name == DEADLINE_HEADER.encode():
            try:
                return time.monotonic_ns() + round(float(value) * 1e6)
            except (ValueError, OverflowError):
                return None
    return None


async def read_body(receive: Receive) -> bytes:
    """The whole body. Errors: TooLarge, ClientDisconnected."""
    body: bytes = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        body = body + bytes(message.get("body", b""))
        if len(body) > BODY_MAX_BYTES:
            raise TooLarge(f"the body has more than {BODY_MAX_BYTES} bytes")
        if not message.get("more_body", False):
            return body


async def while_connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """The work's result; cancels it if the client disconnects. Errors: ClientDisconnected."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
