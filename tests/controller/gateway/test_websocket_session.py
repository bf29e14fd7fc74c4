"""WebSocket sessions: the close code when the worker's end and the deadline come at the same moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from fleetstart.controller.gateway.dispatch.call_record import CallRecord
from fleetstart.controller.gateway.dispatch.version_backend import Attempt, Call
from fleetstart.controller.gateway.websocket_session import (
    DEADLINE_SLACK_S,
    GOING_AWAY,
    LOST,
    POLICY,
    RESTART,
    SocketClose,
    WebSocketSession,
    end_at_deadline,
)
from fleetstart.runtime.contract.errors import DeadlineExceeded
from fleetstart.runtime.contract.ids import InvocationId

LATE = SocketClose(POLICY, "late", error=DeadlineExceeded.code)


@pytest.mark.parametrize(
    ("close", "left_s", "code"),
    [
        (SocketClose(RESTART, "drained"), -0.001, POLICY),
        (SocketClose(RESTART, "drained"), DEADLINE_SLACK_S / 2, POLICY),
        (SocketClose(RESTART, "drained"), DEADLINE_SLACK_S * 2, RESTART),
        (SocketClose(LOST, "lost"), -2.5, POLICY),
        (SocketClose(LOST, "lost"), 1.0, LOST),
        (SocketClose(1000), 0.0, POLICY),
        (SocketClose(4001, "the app's own"), -0.001, 4001),
        (SocketClose(GOING_AWAY, by_client=True), -0.001, GOING_AWAY),
    ],
)
def test_an_end_by_the_worker_at_the_deadline_is_the_deadlines(close: SocketClose, left_s: float, code: int) -> None:
    assert end_at_deadline(close, left_s, LATE).code == code


class Backend:
    """Notes who is to be told of a drain."""

    def __init__(self) -> None:
        self.drain: Callable[[], None] = lambda: None

    def on_drain(self, attempt: Attempt, callback: Callable[[], None]) -> None:
        self.drain = callback


class Upstream:
    """A worker's side that ends as the test says."""

    close_code: int | None = None

    def __init__(self, message: aiohttp.WSMessage | None, ended: Callable[[], None]) -> None:
        self._message = message
        self._ended = ended

    async def receive(self) -> aiohttp.WSMessage:
        self._ended()
        if self._message is None:
            await asyncio.Event().wait()
        return cast(aiohttp.WSMessage, self._message)


def close_of(left_s: float, message: aiohttp.WSMessage | None, *, drained: bool) -> SocketClose:
    """The end of a session whose worker ends `left_s` before the deadline."""

    async def run() -> SocketClose:
        now_ns = time.monotonic_ns()
        call = Call(
            id=InvocationId("a"), method="GET", target="/", headers=[], body=b"", accepted_ns=now_ns,
            accepted_unix_ns=0, deadline_ns=now_ns + round(left_s * 1e9),
        )  # fmt: skip
        backend = Backend()
        record = cast(CallRecord, SimpleNamespace(call=call, backend=backend))

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            raise AssertionError(message)

        session = WebSocketSession(record, {}, receive, cast(Callable[[Any], Awaitable[None]], send), 1000)
        upstream = Upstream(message, (lambda: backend.drain()) if drained else lambda: None)
        first = asyncio.ensure_future(receive())
        return await session.relay(cast(Attempt, None), cast(aiohttp.ClientWebSocketResponse, upstream), first)

    return asyncio.run(run())


GONE = aiohttp.WSMessage(aiohttp.WSMsgType.CLOSED, None, None)
RESTARTING = aiohttp.WSMessage(aiohttp.WSMsgType.CLOSE, 1012, "")


@pytest.mark.parametrize(
    ("message", "drained"),
    [(GONE, False), (RESTARTING, False), (None, True), (GONE, True)],
    ids=["process ended", "server shut down", "drained", "drained and ended"],
)
def test_a_worker_that_ends_just_before_the_deadline_does_not_change_the_code(
    message: aiohttp.WSMessage | None, drained: bool
) -> None:
    close = close_of(DEADLINE_SLACK_S * 0.9, message, drained=drained)
    assert (close.code, close.error) == (POLICY, DeadlineExceeded.code)
    assert close_of(60, message, drained=drained).code in (LOST, RESTART)
