"""WebSockets of a user's app at their deadline: always closed with the code that says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleetstart.runtime.contract.worker_headers import SOCKET_LATE
from fleetstart.runtime.worker.websockets import serve
from fleetstart.runtime.worker_io.asgi import App, Message, Receive, Scope, Send


async def obedient(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "websocket.accept"})
    await asyncio.Event().wait()


async def swallows_its_cancellation(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "websocket.accept"})
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return


async def fails_when_cancelled(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "websocket.accept"})
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise ValueError("cleanup failed") from None


@pytest.mark.parametrize("app", [obedient, swallows_its_cancellation, fails_when_cancelled])
def test_whatever_an_app_does_at_its_deadline_the_close_code_says_so(app: App) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    asyncio.run(serve(app, {"type": "websocket"}, receive, send, 0.01, "r1"))
    code, reason = SOCKET_LATE
    assert sent == [{"type": "websocket.accept"}, {"type": "websocket.close", "code": code, "reason": reason}]
