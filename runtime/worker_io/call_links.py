"""Links of a worker: WebSockets that its gateways keep open to it, each of which carries one call of another function.

A worker cannot reach anything by itself, so it takes an idle link of the gateway that sent the call, and the gateway
opens the next one (`contract.function_calls` has the messages). All of it runs on the worker's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque

from ..contract.errors import Unavailable
from ..contract.function_calls import BROKEN, COMPLETE, TOO_BIG
from .asgi import Message, Receive, Send

LINK_S = 10.0
"""Longest wait for a link: a gateway that lives opens one within milliseconds."""
CLOSE_S = 1.0
"""Longest wait for the close that follows a failed send."""


class LinkClosed(Exception):
    """The gateway has closed the link, with this code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"closed with {code}")
        self.code = code


class Link:
    """One link. Idle until `CallLinks.take` gives it to a call, which closes it."""

    def __init__(self, limit_bytes: int | None, receive: Receive, send: Send) -> None:
        self._limit_bytes = limit_bytes
        self._receive = receive
        self._send = send
        self._first: asyncio.Task[Message] | None = asyncio.create_task(self._next())
        """Waits for the gateway while the link is idle, to learn of its end."""
        self._first.add_done_callback(self._on_first)
        self._taken = False
        self._ended = asyncio.Event()

    def take(self) -> bool:
        """Takes the link for a call; False if the gateway has closed it."""
        self._taken = not self._ended.is_set()
        return self._taken

    async def send(self, data: str | bytes) -> None:
        """Errors: LinkClosed, also for a message above the gateway's limit: it is not sent, because the gateway's close
        could be lost with a connection that breaks while it is written to."""
        if self._limit_bytes is not None:
            size = len(data.encode() if isinstance(data, str) else data)
            if size > self._limit_bytes:
                raise LinkClosed(TOO_BIG)
        message = {"type": "websocket.send", **({"text": data} if isinstance(data, str) else {"bytes": data})}
        try:
            await self._send(message)
        except Exception as error:  # uvicorn has an exception of its own for each protocol
            raise await self._close_of() from error

    async def _close_of(self) -> LinkClosed:
        """The close that made a send fail, with its code."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while True:  # what came before it is of no use any more
                    try:
                        await self.receive()
                    except LinkClosed as closed:
                        return closed
        return LinkClosed(BROKEN)

    async def receive(self) -> str | bytes:
        """Errors: LinkClosed."""
        waiting, self._first = self._first, None
        message = await (waiting if waiting is not None else self._next())
        if message["type"] == "websocket.disconnect":
            raise LinkClosed(int(message.get("code") or 0))
        data: str | bytes = message.get("bytes") or message.get("text") or b""
        return data

    def close(self) -> None:
        """Ends the link; the gateway cancels the call if it still runs."""
        self._ended.set()

    async def until_closed(self) -> None:
        try:
            await self._ended.wait()
        finally:
            if self._first is not None:
                self._first.cancel()
        with contextlib.suppress(Exception):  # the gateway may have closed it first
            await self._send({"type": "websocket.close", "code": COMPLETE})

    async def _next(self) -> Message:
        return await self._receive()

    def _on_first(self, _: asyncio.Task[Message]) -> None:
        if not self._taken:
            self._ended.set()


class CallLinks:
    """The links of one worker, by gateway."""

    def __init__(self) -> None:
        self._idle: defaultdict[str, deque[Link]] = defaultdict(deque)
        self._waiting: defaultdict[str, deque[asyncio.Future[Link]]] = defaultdict(deque)

    async def serve(self, gateway: str, limit_bytes: int | None, receive: Receive, send: Send) -> None:
        """Serves the WebSocket of a new link until a call, or the gateway, has closed it. `limit_bytes` is the most
        bytes of a message that the gateway takes, None if it does not say: it is of an earlier release."""
        await receive()  # websocket.connect
        await send({"type": "websocket.accept"})
        link = Link(limit_bytes, receive, send)
        self._offer(gateway, link)
        await link.until_closed()

    async def take(self, gateway: str) -> Link:
        """Takes an idle link of the gateway, or waits for its next. Errors: Unavailable."""
        idle = self._idle[gateway]
        while idle:
            link = idle.popleft()
            if link.take():
                return link
        waiting: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        self._waiting[gateway].append(waiting)
        try:
            async with asyncio.timeout(LINK_S):
                return await waiting
        except TimeoutError:
            raise Unavailable(f"the gateway did not come for the call of a function within {LINK_S:g} s") from None
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                waiting.result().close()
            raise

    def _offer(self, gateway: str, link: Link) -> None:
        waiting = self._waiting[gateway]
        while waiting:
            first = waiting.popleft()
            if not first.done():
                link.take()
                first.set_result(link)
                return
        self._idle[gateway].append(link)
