"""One open shell: relays and validates frames both ways until a side closes it or a deadline passes.

Neither side is trusted: the client may send anything, and what it runs shares a user with the worker's own process. So
each frame has a size limit, client frames are parsed here, and deadlines are enforced here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from fleetstart.runtime.contract.node.shell import FRAME_MAX_BYTES, Start, read_client

from ..gateway.websocket_session import CLOSE_S, GOING_AWAY, LOST, POLICY, TOO_BIG, SocketClose
from ..http.asgi import Receive, Send

CHECK_S = 0.5
"""Interval between checks of the deadlines, of the key and of the worker."""
START_S = 30.0
"""Deadline of the client's first frame."""
SESSION_MAX_S = 12 * 3600.0
"""Maximum length of a session, however busy it is."""
EXIT_REASON_S = 3.0
"""How long to wait for the status of a worker whose connection was lost."""
REASON_MAX_BYTES = 120
"""A close frame holds 123 bytes of reason."""


class ShellSession:
    """Relays frames between the client and a worker's shell.

    `end_reason` returns why the session must end, "" while it need not; `exit_reason` why its worker ended, None while
    that is unknown.
    """

    def __init__(
        self,
        *,
        upstream: aiohttp.ClientWebSocketResponse,
        receive: Receive,
        send: Send,
        idle_s: float,
        end_reason: Callable[[], str],
        exit_reason: Callable[[], str | None],
    ) -> None:
        self._upstream = upstream
        self._receive = receive
        self._send = send
        self._idle_s = idle_s
        self._end_reason = end_reason
        self._exit_reason = exit_reason
        self._opened_s = self._spoken_s = asyncio.get_running_loop().time()
        self._begun = False

    async def run(self, first: asyncio.Future[Any]) -> None:
        """Relays until the session ends; closes both sides."""
        ways = {asyncio.ensure_future(way) for way in (self._relay_up(first), self._relay_down(), self._watch())}
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            close = next(iter(done)).result()
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            with contextlib.suppress(TimeoutError, aiohttp.ClientError, ConnectionError):
                async with asyncio.timeout(CLOSE_S):
                    await self._upstream.close()
        if not close.by_client:
            with contextlib.suppress(Exception):  # it may have gone meanwhile, which uvicorn raises in its own way
                await self._send({"type": "websocket.close", "code": close.code, "reason": _short(close.reason)})

    async def _relay_up(self, first: asyncio.Future[Any]) -> SocketClose:
        message = await first
        while message["type"] == "websocket.receive":
            text, data = message.get("text"), message.get("bytes")
            rejection = self._rejection(text, data)
            if rejection is not None:
                return rejection
            self._spoken_s = asyncio.get_running_loop().time()
            try:
                await (self._upstream.send_str(text) if text is not None else self._upstream.send_bytes(data))
            except (aiohttp.ClientError, ConnectionError):
                await asyncio.Event().wait()  # the other direction reports how it ended
            message = await self._receive()
        return SocketClose(GOING_AWAY, by_client=True)

    def _rejection(self, text: str | None, data: bytes | None) -> SocketClose | None:
        """The close code for a frame that is invalid or out of order (`contract.node.shell`); None for a valid one."""
        size = len(text.encode("utf-8", "surrogatepass")) if text is not None else len(data or b"")
        if size > FRAME_MAX_BYTES:
            return SocketClose(TOO_BIG, f"a frame has {size} bytes, {FRAME_MAX_BYTES} at most")
        if text is None:
            return None if self._begun else SocketClose(POLICY, "a shell begins with a start, not with input")
        try:
            said = read_client(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            return SocketClose(POLICY, f"not understood: {error}")
        if isinstance(said, Start) == self._begun:
            return SocketClose(POLICY, "a shell begins with a start, once")
        self._begun = True
        return None

    async def _relay_down(self) -> SocketClose:
        while True:
            message = await self._upstream.receive()
            self._spoken_s = asyncio.get_running_loop().time()
            if message.type is aiohttp.WSMsgType.TEXT:
                await self._send({"type": "websocket.send", "text": message.data})
            elif message.type is aiohttp.WSMsgType.BINARY:
                await self._send({"type": "websocket.send", "bytes": message.data})
            elif message.type is aiohttp.WSMsgType.CLOSE and message.data == 1000:
                return SocketClose(1000)
            else:
                return SocketClose(LOST, await self._await_exit_reason())

    async def _await_exit_reason(self) -> str:
        ends_s = asyncio.get_running_loop().time() + EXIT_REASON_S
        while asyncio.get_running_loop().time() < ends_s:
            why = self._exit_reason() or self._end_reason()
            if why:
                return why
            await asyncio.sleep(0.05)
        return "its worker was lost"

    async def _watch(self) -> SocketClose:
        while True:
            now_s = asyncio.get_running_loop().time()
            if why := self._end_reason():
                return SocketClose(GOING_AWAY, why)
            if now_s - self._spoken_s > self._idle_s:
                return SocketClose(GOING_AWAY, f"nothing was typed or printed for {self._idle_s:g} s")
            if now_s - self._opened_s > SESSION_MAX_S:
                return SocketClose(GOING_AWAY, f"open for {SESSION_MAX_S / 3600:g} hours, the maximum of a shell")
            if not self._begun and now_s - self._opened_s > START_S:
                return SocketClose(POLICY, f"no start came within {START_S:g} s")
            await asyncio.sleep(CHECK_S)


def _short(reason: str) -> str:
    return reason.encode()[:REASON_MAX_BYTES].decode(errors="ignore")
