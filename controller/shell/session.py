"""A shell while it is open: frames pass both ways, each looked at, until one side ends it or it may not go on.

Neither side is trusted: the client may send anything, and what it runs shares a user with the worker's own process. So
every frame has a limit, those of the client must be understood here, and the deadlines are kept here.
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

LOOK_S = 0.5
"""Between two looks at whether it may go on."""
START_S = 30.0
"""For the client's first frame."""
MOST_S = 12 * 3600.0
"""However busy it is: what runs for longer is no session."""
FATE_S = 3.0
"""For the node to tell what became of a worker whose connection is gone."""
REASON_MAX_BYTES = 120
"""123 fit into a closing frame."""


class ShellSession:
    """`unwanted` says why it must end, if it must; `fate` what became of its worker, once that is known."""

    def __init__(
        self,
        *,
        upstream: aiohttp.ClientWebSocketResponse,
        receive: Receive,
        send: Send,
        idle_s: float,
        unwanted: Callable[[], str],
        fate: Callable[[], str | None],
    ) -> None:
        self._upstream = upstream
        self._receive = receive
        self._send = send
        self._idle_s = idle_s
        self._unwanted = unwanted
        self._fate = fate
        self._opened_s = self._spoken_s = asyncio.get_running_loop().time()
        self._begun = False

    async def run(self, first: asyncio.Future[Any]) -> None:
        """Returns when it is over, and both sides know."""
        ways = {asyncio.ensure_future(way) for way in (self._up(first), self._down(), self._watch())}
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
            with contextlib.suppress(Exception):  # it may have gone meanwhile, which uvicorn says in its own way
                await self._send({"type": "websocket.close", "code": close.code, "reason": _short(close.reason)})

    async def _up(self, first: asyncio.Future[Any]) -> SocketClose:
        message = await first
        while message["type"] == "websocket.receive":
            text, data = message.get("text"), message.get("bytes")
            refusal = self._refusal(text, data)
            if refusal is not None:
                return refusal
            self._spoken_s = asyncio.get_running_loop().time()
            try:
                await (self._upstream.send_str(text) if text is not None else self._upstream.send_bytes(data))
            except (aiohttp.ClientError, ConnectionError):
                await asyncio.Event().wait()  # the other way knows how it ended
            message = await self._receive()
        return SocketClose(GOING_AWAY, by_client=True)

    def _refusal(self, text: str | None, data: bytes | None) -> SocketClose | None:
        """Of a frame that is none of `contract.terminal`'s, or not in its place."""
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

    async def _down(self) -> SocketClose:
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
                return SocketClose(LOST, await self._last_words())

    async def _last_words(self) -> str:
        ends_s = asyncio.get_running_loop().time() + FATE_S
        while asyncio.get_running_loop().time() < ends_s:
            why = self._fate() or self._unwanted()
            if why:
                return why
            await asyncio.sleep(0.05)
        return "its worker was lost"

    async def _watch(self) -> SocketClose:
        while True:
            now_s = asyncio.get_running_loop().time()
            if why := self._unwanted():
                return SocketClose(GOING_AWAY, why)
            if now_s - self._spoken_s > self._idle_s:
                return SocketClose(GOING_AWAY, f"nothing was typed or printed for {self._idle_s:g} s")
            if now_s - self._opened_s > MOST_S:
                return SocketClose(GOING_AWAY, f"open for {MOST_S / 3600:g} hours, the most that a shell may be")
            if not self._begun and now_s - self._opened_s > START_S:
                return SocketClose(POLICY, f"no start came within {START_S:g} s")
            await asyncio.sleep(LOOK_S)


def _short(reason: str) -> str:
    return reason.encode()[:REASON_MAX_BYTES].decode(errors="ignore")
