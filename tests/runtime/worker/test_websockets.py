"""WebSockets of a user's app at their deadline, which the close code says, and of one that does nothing but send."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from uvicorn.protocols.utils import ClientDisconnected

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


async def awaits_what_was_cancelled(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "websocket.accept"})
    task = asyncio.ensure_future(asyncio.Event().wait())
    task.cancel()
    await task


async def exits(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "websocket.accept"})
    raise SystemExit(3)


@pytest.mark.parametrize("app", [awaits_what_was_cancelled, exits])
def test_whatever_an_app_raises_ends_its_socket_alone(app: App, capsys: pytest.CaptureFixture[str]) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    asyncio.run(serve(app, {"type": "websocket"}, receive, send, None, "r1"))
    assert (sent[-1]["type"], sent[-1]["code"]) == ("websocket.close", 1011)
    assert "socket r1 failed:" in capsys.readouterr().err


def test_an_app_that_only_sends_leaves_the_loop_to_others_until_its_client_leaves(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A connection that is lost takes what is sent without a wait: that it is lost, the loop has to be told."""
    lost = False

    async def send(message: Message) -> None:
        if lost:
            raise ClientDisconnected

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def floods(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})
        while True:
            await send({"type": "websocket.send", "text": "more"})

    async def run() -> None:
        nonlocal lost
        serving = asyncio.create_task(serve(floods, {"type": "websocket"}, receive, send, None, "r1"))
        await asyncio.sleep(0)
        lost = True
        await serving

    asyncio.run(run())
    told = capsys.readouterr()
    assert (caplog.text, told.out, told.err) == ("", "", ""), "that its client left is no failure of the app"
