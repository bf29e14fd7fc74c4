"""Links of a gateway to a worker that is a WebSocket server of the test: what they carry, and what they refuse."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from fleetstart.controller.function_calls.worker_links import HEAD_BYTES, Socket, WorkerLinks
from fleetstart.controller.gateway.dispatch.grants import Grants
from fleetstart.controller.gateway.node_links import NodeLinks
from fleetstart.controller.state.view import View
from fleetstart.runtime.contract.function_calls import CallRequest
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.worker_headers import LINK_HEADER, LINK_LIMIT_HEADER, TOKEN_HEADER

WORKER = WorkerId("w-one")
MAX_BODY = 1000
HEAD = CallRequest(grant="hush", function="embed", method="POST", path="/", number=0, has_body=True)
WAIT_S = 10.0


class Opened:
    """The handshake headers and the fate of the first link: the size of the body that was served, or None."""

    def __init__(self, headers: dict[str, str], served: int | None) -> None:
        self.headers = headers
        self.served = served


async def sent(size: int) -> Opened:
    """Sends a call with a body of `size` bytes over the gateway's link, as a worker does that checks nothing."""
    bodies: asyncio.Queue[int] = asyncio.Queue()
    opened: asyncio.Future[Opened] = asyncio.get_running_loop().create_future()

    async def worker(link: ServerConnection) -> None:
        if opened.done():  # the next link, which stays idle
            await link.wait_closed()
            return
        try:
            await link.send(msgspec.json.encode(HEAD).decode())
            await link.send(bytes(size))
            await link.recv()
        except ConnectionClosed:
            pass
        if not opened.done():
            headers = link.request.headers if link.request is not None else {}
            opened.set_result(Opened(dict(headers), None if bodies.empty() else bodies.get_nowait()))

    async def answer(worker: WorkerId, socket: Socket, request: CallRequest, body: bytes) -> None:
        assert (worker, request) == (WORKER, HEAD)
        bodies.put_nowait(len(body))

    async with serve(worker, "127.0.0.1", 0) as server, aiohttp.ClientSession() as session:
        host, port = next(iter(server.sockets)).getsockname()
        status = SimpleNamespace(endpoint=f"{host}:{port}", token="secret")
        at: Any = SimpleNamespace(id=WORKER, status=status)
        grants = Grants("gw-1")
        links = WorkerLinks("gw-1", grants, session, NodeLinks(View()), answer, max_body_bytes=MAX_BODY)
        grants.on_issue = links.keep_spare
        record: Any = None
        attempt: Any = SimpleNamespace(worker=at)
        grants.issue(record, attempt)
        try:
            return await opened
        finally:
            await links.close()


def outcome(size: int) -> Opened:
    return asyncio.run(asyncio.wait_for(sent(size), WAIT_S))


def test_the_worker_is_told_whose_link_it_is_and_what_the_gateway_takes() -> None:
    headers = outcome(MAX_BODY).headers
    told = {name: headers[name] for name in (TOKEN_HEADER, LINK_HEADER, LINK_LIMIT_HEADER)}
    assert told == {TOKEN_HEADER: "secret", LINK_HEADER: "gw-1", LINK_LIMIT_HEADER: str(MAX_BODY + HEAD_BYTES)}


@pytest.mark.parametrize(("above", "served"), [(0, MAX_BODY + HEAD_BYTES), (1, None)])
def test_the_gateway_takes_no_message_above_the_limit_whatever_the_worker_does(above: int, served: int | None) -> None:
    assert outcome(MAX_BODY + HEAD_BYTES + above).served == served
