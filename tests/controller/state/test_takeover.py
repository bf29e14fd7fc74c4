"""Takeover by a controller of what it finds in Redis: fences, orders, calls and rows of a dead one; no processes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from fleetstart.controller.billing.ledger_writer import LedgerWriter
from fleetstart.controller.scheduler.leader import LeaderLease
from fleetstart.controller.scheduler.loop import Scheduler
from fleetstart.controller.scheduler.step import Step
from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.state.sync import StateSync
from fleetstart.controller.state.view import View
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import InvocationRow, InvocationTrace, OpenInvocation
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.timeline import Timeline
from tests.controller.peers.test_pool import Keys
from tests.controller.scheduler.test_autoscaler import spec
from tests.servers import RedisServer, until


def test_a_stale_fence_is_refused(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        client = connect(redis_server.url)
        one, two = (LeaderLease(client, StateSync(client, View())) for _ in range(2))
        order = WorkerOrder(
            worker=WorkerId("w"), node=NodeId("n"), epoch="e", version=Version(1), spec=spec(), ordered_unix_ns=1
        )
        first = await one.acquire_or_renew("gw-1", 0)
        assert await one.write(Step(orders=[order]), first)
        assert await two.acquire_or_renew("gw-2", 0) == 0, "the lease is held"
        await client.delete(keys.LEADER)  # it expires
        later = await two.acquire_or_renew("gw-2", 0)
        assert later > first
        assert await two.acquire_or_renew("gw-2", later) == later, "renewal keeps the fence"
        assert not await one.write(Step(deleted_orders=[order]), first)
        assert await client.hexists(keys.desired(NodeId("n")), "w"), "nothing of a refused step was written"
        assert await two.write(Step(deleted_orders=[order]), later)
        assert not await client.hexists(keys.desired(NodeId("n")), "w")
        await client.aclose()

    asyncio.run(scenario())


def test_a_new_scheduler_knows_what_the_last_one_ordered_without_being_told(redis_server: RedisServer) -> None:
    """A publication may be lost, or later than the lease. The function is gone, so the order is deleted."""

    async def scenario() -> None:
        client = connect(redis_server.url)
        await client.hset(keys.NODES, "n", "1")
        states = [StateSync(client, View()) for _ in range(2)]
        for state in states:
            await state.resync()
        one, two = (LeaderLease(client, state) for state in states)
        order = WorkerOrder(
            worker=WorkerId("w"), node=NodeId("n"), epoch="e", version=Version(1), spec=spec(), ordered_unix_ns=1
        )
        assert await one.write(Step(orders=[order]), await one.acquire_or_renew("gw-1", 0))
        await one.release("gw-1")
        scheduler = Scheduler("gw-2", two, LedgerWriter(client), lambda order: order, Keys())
        running = asyncio.create_task(scheduler.run())
        async with asyncio.timeout(10):
            while await client.hexists(keys.desired(NodeId("n")), "w"):
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.aclose()

    asyncio.run(scenario())


def test_a_status_that_comes_during_a_read_keeps_no_order_out_of_the_view(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        client = connect(redis_server.url)
        order = WorkerOrder(
            worker=WorkerId("w"), node=NodeId("n"), epoch="e", version=Version(1), spec=spec(), ordered_unix_ns=1
        )
        await client.hset(keys.NODES, "n", "1")
        await client.hset(keys.desired(order.node), order.worker, msgspec.json.encode(order))
        state = StateSync(client, View())
        read = state._full._read_nodes

        async def read_nodes(nodes: list[NodeId], failures: list[Any]) -> Any:
            found = await read(nodes, failures)
            if not nodes:
                return found
            status = WorkerStatus(
                worker=order.worker, node=order.node, function=order.spec.name, version=order.version, state="ready"
            )
            assert state.view.put_status(status)
            return found

        monkeypatch.setattr(state._full, "_read_nodes", read_nodes)
        await state.resync()
        assert state.view.orders == {order.worker: order}
        assert state.view.statuses[order.worker].state == "ready"
        await client.aclose()

    asyncio.run(scenario())


def _call(name: str, **fields: Any) -> OpenInvocation:
    values = {"gateway": "gw-dead", "function": FunctionName("f"), "version": Version(1), "accepted_unix_ms": 0}
    return OpenInvocation(id=InvocationId(name), **{**values, **fields})


def _trace(name: str, status: int = 200) -> InvocationTrace:
    row = InvocationRow(
        id=InvocationId(name), function=FunctionName("f"), version=Version(1), status=status, accepted_unix_ms=0,
        queue_ms=0, billed_ms=5, memory_bytes=1, cost_nusd=7,
    )  # fmt: skip
    return InvocationTrace(row=row, timeline=Timeline())


def test_calls_of_a_dead_gateway_are_closed_once_and_may_be_taken_over(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        client = connect(redis_server.url)
        dead, alive = LedgerWriter(client), LedgerWriter(client)
        for name in ("lost", "retried"):
            dead.opened(_call(name))
        await dead.flush()
        alive.opened(_call("retried", gateway="gw-alive"))
        await alive.flush()
        await client.set(keys.gateway("gw-alive"), "{}")

        async def closed(at_s: int) -> int:
            return await alive.close_abandoned(own="gw-alive", now_ns=at_s * 1_000_000_000)

        assert [await closed(at_s) for at_s in (100, 110, 120)] == [0, 0, 0]
        dead.opened(_call("young", accepted_unix_ms=-5_000_000))  # by a clock that stepped
        await dead.flush()
        assert await closed(130) == 1
        alive.ended(_trace("retried"))
        await alive.flush()
        assert await closed(135) == 0
        entries: Any = await client.xrange(keys.LEDGER)
        rows = {r["id"]: r for r in (msgspec.json.decode(fields[b"row"]) for _, fields in entries)}
        assert {name: row["status"] for name, row in rows.items()} == {"lost": 502, "retried": 200}
        assert rows["lost"]["cost_nusd"] == 0
        assert await client.hkeys(keys.OPEN) == [b"young"]
        await client.aclose()

    asyncio.run(scenario())


def test_a_gateway_without_its_lease_closes_no_calls_as_lost(redis_server: RedisServer) -> None:
    """Not its own, and nobody else's: after an outage all leases are gone for a moment."""

    async def scenario() -> None:
        client = connect(redis_server.url)
        writer = LedgerWriter(client)
        writer.opened(_call("own", gateway="gw-own"))
        writer.opened(_call("other", gateway="gw-other"))
        await writer.flush()
        for at_s in range(0, 100, 5):
            assert await writer.close_abandoned(own="gw-own", now_ns=at_s * 1_000_000_000) == 0
        await client.set(keys.gateway("gw-own"), "{}")
        closed = [
            await writer.close_abandoned(own="gw-own", now_ns=at_s * 1_000_000_000) for at_s in range(100, 131, 5)
        ]
        assert closed == [0, 0, 0, 0, 0, 0, 1], "30 s after the first look at which Redis took writes"
        await writer.flush()
        assert await client.hkeys(keys.OPEN) == [b"own"]
        await client.aclose()

    asyncio.run(scenario())


def test_rows_wait_for_redis_and_are_written_once(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        client = connect(redis_server.url)
        writer = LedgerWriter(client)
        running = asyncio.create_task(writer.run())
        writer.ended(_trace("before"))
        await until(lambda: not writer.pending)
        redis_server.kill()
        writer.opened(_call("while-away"))
        writer.ended(_trace("while-away"))
        writer.ended(_trace("while-away", status=500))
        await until(lambda: "ledger rows cannot be written: redis is unavailable" in caplog.text)
        assert writer.pending
        await asyncio.to_thread(redis_server.start)
        await until(lambda: not writer.pending)
        writer.ended(_trace("before"))
        await until(lambda: not writer.pending)
        running.cancel()
        entries: Any = await client.xrange(keys.LEDGER)
        rows = [msgspec.json.decode(fields[b"row"]) for _, fields in entries]
        assert [(row["id"], row["status"]) for row in rows] == [("before", 200), ("while-away", 200)]
        await client.aclose()

    asyncio.run(scenario())
