"""WebSockets of a user's ASGI app, always closed with a code and a reason."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected

from ..contract.errors import InvalidInput
from ..contract.worker_headers import SOCKET_LATE
from ..worker_io import user_errors
from ..worker_io.asgi import App, Message, Receive, Scope, Send

MESSAGE_MAX_BYTES = 1 << 30
"""Largest message. The gateway's own limit is far below; this only bounds the effect of a bug."""
NOT_SUPPORTED = InvalidInput(
    "this function does not accept WebSockets",
    hint="only ASGI apps do: app = function(...)(asgi_app) with a websocket route",
)
INTERNAL_ERROR = 1011


def rejecting(send: Send) -> Send:
    """Wraps `send` so that an HTTP response rejects a WebSocket handshake."""

    async def sending(message: Message) -> None:
        if message["type"].startswith("http.response."):
            message["type"] = "websocket." + message["type"]
        await send(message)

    return sending


async def serve(app: App, scope: Scope, receive: Receive, send: Send, timeout_s: float | None, request: str) -> None:
    """Runs the app for one WebSocket. Raises nothing: an error of the app is logged and closes with 1011."""
    state = "connecting"

    async def sending(message: Message) -> None:
        nonlocal state
        try:
            await send(message)
        except ClientDisconnected:
            state = "closed"
            raise
        state = {"websocket.accept": "open", "websocket.send": "open"}.get(message["type"], "closed")
        await asyncio.sleep(0)  # sending alone need not wait, and an app may do nothing else (`call_gate`)

    close: dict[str, Any] = {"type": "websocket.close", "code": 1000}
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            await app(scope, receive, sending)
    except ClientDisconnected:
        pass  # of a send: to leave then is no failure of the app
    except BaseException as raised:
        error = user_errors.of_user(raised)
        if not limit.expired():
            user_errors.log(error, f"socket {request or '-'} failed:")
            close |= {"code": INTERNAL_ERROR, "reason": "the handler raised; its traceback is in the function's log"}
    if limit.expired():  # also for an app that swallowed its cancellation and returned
        close["code"], close["reason"] = SOCKET_LATE
    if state != "closed":
        await _close(send, close)


async def _close(send: Send, close: dict[str, Any]) -> None:
    try:
        await send(close)
    except Exception as error:  # the client has disconnected: uvicorn raises an exception of its own
        user_errors.log(error, "a WebSocket was disconnected before it was closed:")
