"""Links of a worker: who gets which, and how they end. The gateway's side is a pair of queues."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from fleetstart.runtime.contract.errors import HandlerFailed, NotFound
from fleetstart.runtime.contract.function_calls import TOO_BIG
from fleetstart.runtime.worker_io.asgi import Message
from fleetstart.runtime.worker_io.call_links import CallLinks, Link, LinkClosed
from fleetstart.runtime.worker_io.callee_errors import as_seen_outside, mark_callee

WAIT_S = 10.0


class GatewaySide:
    """A link as its gateway sees it."""

    def __init__(self, links: CallLinks, gateway: str = "gw-1", *, limit_bytes: int | None = None) -> None:
        self._to_worker: asyncio.Queue[Message] = asyncio.Queue()
        self.got: asyncio.Queue[Message] = asyncio.Queue()
        self._to_worker.put_nowait({"type": "websocket.connect"})
        self.served = asyncio.create_task(links.serve(gateway, limit_bytes, self._to_worker.get, self.got.put))

    def send(self, **message: Any) -> None:
        self._to_worker.put_nowait({"type": "websocket.receive", **message})

    def close(self, code: int) -> None:
        self._to_worker.put_nowait({"type": "websocket.disconnect", "code": code})

    async def next(self) -> str:
        return str((await self.got.get())["type"])


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, WAIT_S))


def test_a_call_takes_an_idle_link_of_its_gateway_or_waits_for_one() -> None:
    async def scenario() -> None:
        links = CallLinks()
        other = GatewaySide(links, "gw-2")
        assert await other.next() == "websocket.accept"
        waiting = asyncio.create_task(links.take("gw-1"))
        await asyncio.sleep(0)
        assert not waiting.done()
        side = GatewaySide(links)
        link = await waiting
        await link.send("head")
        side.send(text="answer")
        side.send(bytes=b"body")
        assert (await link.receive(), await link.receive()) == ("answer", b"body")
        side.close(1000)
        with pytest.raises(LinkClosed) as closed:
            await link.receive()
        assert closed.value.code == 1000
        link.close()
        await side.served
        assert [await side.next() for _ in range(3)] == ["websocket.accept", "websocket.send", "websocket.close"]
        other.close(1001)
        await other.served

    run(scenario())


def test_a_link_that_its_gateway_closed_is_given_to_no_call() -> None:
    async def scenario() -> None:
        links = CallLinks()
        dead, live = GatewaySide(links), GatewaySide(links)
        dead.close(1001)
        await dead.served
        taken = await links.take("gw-1")
        live.send(text="mine")
        assert await taken.receive() == "mine"
        taken.close()
        await live.served

    run(scenario())


def test_a_message_above_its_gateways_limit_is_not_sent() -> None:
    """The gateway would close a connection with unread bytes: a worker that writes learns of a broken pipe, and may
    never read the close code before it."""

    async def scenario() -> None:
        links = CallLinks()
        side = GatewaySide(links, limit_bytes=4)
        link = await links.take("gw-1")
        await link.send(b"four")
        for message in (b"five.", "über"):
            with pytest.raises(LinkClosed) as closed:
                await link.send(message)
            assert closed.value.code == TOO_BIG
        link.close()
        await side.served
        assert [await side.next() for _ in range(3)] == ["websocket.accept", "websocket.send", "websocket.close"]

    run(scenario())


def test_a_call_that_was_cancelled_leaves_the_link_to_the_next() -> None:
    async def scenario() -> None:
        links = CallLinks()
        first, second = (asyncio.create_task(links.take("gw-1")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        side = GatewaySide(links)
        link: Link = await second
        link.close()
        await side.served

    run(scenario())


def test_an_error_of_a_callee_is_the_handlers_fault_outside() -> None:
    own = NotFound("function x does not exist", hint="look")
    assert as_seen_outside(own) is own
    seen = as_seen_outside(mark_callee(own, "embed"))
    assert isinstance(seen, HandlerFailed)
    assert seen.message == "its call of function embed failed with not_found: function x does not exist"
    assert seen.hint == "look"
