"""Links to workers: while calls run on a worker that may call other functions, one idle WebSocket is open to it.

The worker sends a call over the idle link, and the next one is opened. So no worker needs a way out, or the address of
a gateway: it is the gateway that comes, through the worker's endpoint and with the worker's token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec

from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.function_calls import COMPLETE, CallRequest
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.worker_headers import LINK_HEADER, LINK_LIMIT_HEADER, TOKEN_HEADER

from ..gateway.dispatch.grants import Grants
from ..gateway.dispatch.version_backend import Worker
from ..gateway.node_links import NodeLinks

Socket = aiohttp.ClientWebSocketResponse
Serve = Callable[[WorkerId, Socket, CallRequest, bytes], Awaitable[None]]

LINKS_MAX = 64
"""Links to one worker: calls that its functions may make at a time. Others wait in the worker for a link."""
LINGER_S = 5.0
"""How long an idle link stays after the last call that could use it: the next call may be about to come."""
RETRY_S = 0.1
"""Pause after a link that could not be opened: its worker ends, or is new."""
BODY_S = 30.0
"""Timeout for the body of a call, which follows its head at once."""
HEAD_BYTES = 64 * 1024
"""Size of a call's head, headers included."""


class WorkerLinks:
    """The links of one gateway to workers."""

    def __init__(
        self,
        gateway: str,
        grants: Grants,
        session: aiohttp.ClientSession,
        node_links: NodeLinks,
        serve: Serve,
        *,
        max_body_bytes: int,
    ) -> None:
        self._node_links = node_links
        self._gateway = gateway
        self._grants = grants
        self._session = session
        self._serve = serve
        self._message_bytes = max_body_bytes + HEAD_BYTES
        """Most bytes of a message. The worker is told, and refuses what is above it before a byte is sent: one that
        sends it all the same loses the connection, and may not learn why."""
        self._spare: set[WorkerId] = set()
        """Workers with an idle link, or one that is being opened."""
        self._open: Counter[WorkerId] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def keep_spare(self, worker: Worker) -> None:
        """Makes sure that the worker has an idle link, now or soon."""
        if worker.id in self._spare or self._open[worker.id] >= LINKS_MAX:
            return
        self._spare.add(worker.id)
        self._open[worker.id] += 1
        task = asyncio.get_running_loop().create_task(self._link(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _link(self, worker: Worker) -> None:
        """One link from its opening to its end, with the call that it carries."""
        spare = True
        try:
            while self._grants.any_of(worker.id):
                try:
                    async with self._connect(worker) as socket:
                        call = await self._first_call(socket, worker.id)
                        if call is not None:
                            self._spare.discard(worker.id)
                            spare = False
                            self.keep_spare(worker)
                            await self._serve(worker.id, socket, *call)
                            return
                except (aiohttp.ClientError, ConnectionError, TimeoutError, *UNDECODABLE):
                    pass
                await asyncio.sleep(RETRY_S)
        finally:
            self._end(worker, spare=spare)

    def _end(self, worker: Worker, *, spare: bool) -> None:
        self._open[worker.id] -= 1
        if not self._open[worker.id]:
            del self._open[worker.id]
        if spare:
            self._spare.discard(worker.id)
        elif self._grants.any_of(worker.id):
            self.keep_spare(worker)  # this one may have been the last that was allowed

    def _connect(self, worker: Worker) -> Any:
        url, tls = self._node_links.target(worker.status, "/")
        return self._session.ws_connect(
            url,
            headers=[
                (TOKEN_HEADER, worker.status.token),
                (LINK_HEADER, self._gateway),
                (LINK_LIMIT_HEADER, str(self._message_bytes)),
            ],
            max_msg_size=self._message_bytes + 1,  # aiohttp refuses a message of this size, too
            timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
            autoclose=False,
            **tls,
        )

    async def _first_call(self, socket: Socket, worker: WorkerId) -> tuple[CallRequest, bytes] | None:
        """Waits for a call; None if the worker has closed the link, or nobody needs it any more."""
        receiving = asyncio.ensure_future(socket.receive())
        try:
            while not receiving.done():
                await asyncio.wait({receiving}, timeout=LINGER_S)
                if not receiving.done() and not self._grants.any_of(worker):
                    return None
        finally:
            if not receiving.done():
                receiving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await receiving
        message = receiving.result()
        if message.type is not aiohttp.WSMsgType.TEXT:
            await _answer_close(socket, message)
            return None
        request = msgspec.json.decode(message.data, type=CallRequest)
        body = b""
        if request.has_body:
            async with asyncio.timeout(BODY_S):
                message = await socket.receive()
            if message.type is not aiohttp.WSMsgType.BINARY:
                await _answer_close(socket, message)
                return None
            body = message.data
        return request, body


async def _answer_close(socket: Socket, message: aiohttp.WSMessage) -> None:
    """Answers the worker's close; a message that is too large was answered with its code already."""
    if message.type is aiohttp.WSMsgType.CLOSE:
        await socket.close(code=COMPLETE)
