"""One WebSocket between a client and a worker: relays messages both ways until a side, or the deadline, ends it."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

import aiohttp

from fleetstart.runtime.contract.errors import DeadlineExceeded, TooLarge, WorkerLost
from fleetstart.runtime.contract.worker_headers import SOCKET_LATE

from ..http.asgi import Receive, Scope, Send
from ..http.websocket import BROKEN
from .dispatch.call_record import CallRecord
from .dispatch.version_backend import Attempt

IDLE_S = 300.0
CLOSE_S = 2.0
"""Timeout of the closing handshake."""
DEADLINE_SLACK_S = 0.02
"""An end by the worker's side this close before the deadline counts as the deadline: the worker keeps the deadline by a
clock of its own, in whole milliseconds, and may end or lose its connection before its close frame is here."""
APP_CODES = 3000
"""The first close code that belongs to applications (RFC 6455, section 7.4.2)."""
GOING_AWAY, POLICY, TOO_BIG, LOST, RESTART = 1001, 1008, 1009, 1011, 1012


class SocketClose(NamedTuple):
    """The end of a WebSocket: its close code, reason and cause."""

    code: int
    reason: str = ""
    by_client: bool = False
    """The client has closed it, or has been told already why it is closed."""
    error: str = ""
    """Error code of the row; empty if client or app closed."""


class WebSocketSession:
    """A WebSocket that is open or about to be: its client's side."""

    def __init__(self, record: CallRecord, scope: Scope, receive: Receive, send: Send, max_message_bytes: int) -> None:
        self.record = record
        self.scope = scope
        self.receive = receive
        self.send = send
        self.max_message_bytes = max_message_bytes
        self._last_message_s = 0.0

    async def close(self, close: SocketClose) -> None:
        await self.send({"type": "websocket.close", "code": sendable(close.code), "reason": close.reason})

    async def relay(
        self, attempt: Attempt, upstream: aiohttp.ClientWebSocketResponse, first: asyncio.Future[Any]
    ) -> SocketClose:
        """Relays messages both ways until the WebSocket ends. Returns how it ended."""
        loop = asyncio.get_running_loop()
        drained: asyncio.Future[SocketClose] = loop.create_future()

        def on_drain() -> None:
            if not drained.done():
                drained.set_result(SocketClose(RESTART, "its worker is drained: connect again"))

        self.record.backend.on_drain(attempt, on_drain)
        self._last_message_s = loop.time()
        ways = (asyncio.ensure_future(self._up(upstream, first)), asyncio.ensure_future(self._down(upstream)))
        try:
            while True:
                left_s = (self.record.call.deadline_ns - time.monotonic_ns()) / 1e9
                idle_s = self._last_message_s + IDLE_S - loop.time()
                if left_s <= 0:
                    return self._late()
                if idle_s <= 0:
                    return SocketClose(GOING_AWAY, f"silent for {IDLE_S:g} s", error="idle")
                done, _ = await asyncio.wait(
                    {*ways, drained}, timeout=min(left_s, idle_s), return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    close = next((way.result() for way in ways if way in done), None) or drained.result()
                    left_s = (self.record.call.deadline_ns - time.monotonic_ns()) / 1e9
                    return end_at_deadline(close, left_s, self._late())
        finally:
            drained.cancel()
            for way in ways:
                await cancel_and_wait(way)

    async def _up(self, upstream: aiohttp.ClientWebSocketResponse, first: asyncio.Future[Any]) -> SocketClose:
        message = await first
        while message["type"] == "websocket.receive":
            self._last_message_s = asyncio.get_running_loop().time()
            text, data = message.get("text"), message.get("bytes")
            if len(text.encode() if text is not None else data) > self.max_message_bytes:
                return self._too_big()
            try:
                if text is not None:
                    await upstream.send_str(text)
                else:
                    await upstream.send_bytes(data)
            except (aiohttp.ClientError, ConnectionError):
                await asyncio.Event().wait()  # `_down` returns how it ended
            message = await self.receive()
        code = int(message.get("code") or GOING_AWAY)
        error = TooLarge.code if code == TOO_BIG and message.get(BROKEN) else ""
        return SocketClose(code, message.get("reason") or "", by_client=True, error=error)

    async def _down(self, upstream: aiohttp.ClientWebSocketResponse) -> SocketClose:
        while True:
            message = await upstream.receive()
            self._last_message_s = asyncio.get_running_loop().time()
            if message.type is aiohttp.WSMsgType.TEXT:
                await self.send({"type": "websocket.send", "text": message.data})
            elif message.type is aiohttp.WSMsgType.BINARY:
                await self.send({"type": "websocket.send", "bytes": message.data})
            elif message.type is aiohttp.WSMsgType.CLOSE and (message.data, message.extra) == SOCKET_LATE:
                return self._late()
            elif message.type is aiohttp.WSMsgType.CLOSE:
                return SocketClose(int(message.data or 1000), message.extra or "")
            elif message.type is aiohttp.WSMsgType.ERROR and upstream.close_code == TOO_BIG:
                return self._too_big()
            else:
                return SocketClose(LOST, "its worker was lost", error=WorkerLost.code)

    def _late(self) -> SocketClose:
        allowed_s = (self.record.call.deadline_ns - self.record.call.accepted_ns) / 1e9
        return SocketClose(POLICY, f"open for the {allowed_s:g} s that it may be", error=DeadlineExceeded.code)

    def _too_big(self) -> SocketClose:
        return SocketClose(TOO_BIG, f"a message has more than {self.max_message_bytes} bytes", error=TooLarge.code)


def end_at_deadline(close: SocketClose, left_s: float, late: SocketClose) -> SocketClose:
    """Decides how a WebSocket ends whose worker's side ended `left_s` before the deadline.

    At the deadline several things happen in any order: the worker's close frame, the end of its process, its drain.
    Then the deadline is the reason, unless the client or the app itself closed.
    """
    if left_s > DEADLINE_SLACK_S or close.by_client or close.code >= APP_CODES:
        return close
    return late


def sendable(code: int) -> int:
    """A close code that may be sent: 1005, 1006 and 1015 stand for none and must not be."""
    return code if 1000 <= code < 5000 and code not in (1004, 1005, 1006, 1015) else 1000


async def cancel_and_wait(task: asyncio.Future[Any]) -> None:
    """Cancels the task and waits until it has ended; its result or exception is dropped."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
