"""WebSockets at the worker's door: handed to the user's own ASGI app, and always ended with a word."""

from __future__ import annotations

import asyncio
from typing import Any

from ..contract.errors import InvalidInput
from ..contract.worker_headers import SOCKET_LATE
from ..worker_io import user_errors as blame
from ..worker_io.asgi import App, Message, Receive, Scope, Send

MESSAGE_MAX_BYTES = 1 << 30
"""The gateway's own limit is far below; this only bounds what a bug could do."""
NOT_TAKEN = InvalidInput(
    "this function takes no WebSockets", hint="only ASGI apps do: app = function(...)(asgi_app) with a websocket route"
)
WENT_WRONG = 1011


def denying(send: Send) -> Send:
    """Lets what answers HTTP answer a handshake, too."""

    async def sending(message: Message) -> None:
        if message["type"].startswith("http.response."):
            message["type"] = "websocket." + message["type"]
        await send(message)

    return sending


async def serve(app: App, scope: Scope, receive: Receive, send: Send, timeout_s: float | None, request: str) -> None:
    """Runs the app for one socket. Raises nothing: what the app raised is in the log, and its end is 1011."""
    state = "connecting"

    async def sending(message: Message) -> None:
        nonlocal state
        await send(message)
        state = {"websocket.accept": "open", "websocket.send": "open"}.get(message["type"], "closed")

    close: dict[str, Any] = {"type": "websocket.close", "code": 1000}
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            await app(scope, receive, sending)
    except Exception as error:
        if limit.expired():
            close["code"], close["reason"] = SOCKET_LATE
        else:
            blame.log(error, f"socket {request or '-'} failed:")
            close |= {"code": WENT_WRONG, "reason": "the handler raised; its traceback is in the function's log"}
    if state != "closed":
        await _close(send, close)


async def _close(send: Send, close: dict[str, Any]) -> None:
    try:
        await send(close)
    except Exception as error:  # whoever was there has gone: uvicorn says so with an exception of its own
        blame.log(error, "a socket was gone before it was closed:")
