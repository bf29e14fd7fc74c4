"""kill -9 of Redis and of controllers, under calls; two controllers; fences; the ledger has each call once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
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
from tests.controller.conftest import ControllerProcess, HandNode
from tests.controller.peers.test_pool import Keys
from tests.controller.scheduler.test_autoscaler import spec
from tests.servers import RedisServer, until, wait_until


@pytest.fixture
def second(redis_url: str, controller: ControllerProcess) -> Iterator[ControllerProcess]:
    other = ControllerProcess(controller.home.parent / "home2", redis_url, FS_STORE=str(controller.home / "store"))
    try:
        yield other.start()
    finally:
        other.close()


def status(controller: ControllerProcess) -> dict[str, Any]:
    return dict(controller.http.get("/api/v1/status").json())


class Caller:
    """Calls one function again and again until told to stop; a refused or broken connection is tried again."""

    def __init__(self, urls: list[str], function: str) -> None:
        self.answers: list[int] = []
        self.ids: list[str] = []
        self._urls = urls
        self._function = function
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(3)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        with httpx.Client(timeout=20) as http:
            count = 0
            while not self._stop.is_set():
                count += 1
                request_id = f"call-{number}-{count}"
                self.answers.append(self._until_answered(http, number, request_id))

    def _until_answered(self, http: httpx.Client, number: int, request_id: str) -> int:
        ends = time.monotonic() + 20
        while time.monotonic() < ends:
            try:
                url = self._urls[number % len(self._urls)]
                answer = http.get(f"{url}/fn/{self._function}", headers={"x-request-id": request_id})
                self.ids.append(answer.headers["x-request-id"])
                return answer.status_code
            except httpx.TransportError:
                number += 1  # what a client does: the next address
        return 0

    def more(self, count: int = 20) -> None:
        enough = len(self.answers) + count
        wait_until(lambda: len(self.answers) >= enough, 20, what="more answers")

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)


def test_redis_dies_under_calls_and_hot_functions_are_served(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    controller.deploy("hello", concurrency=4)
    controller.http.get("/fn/hello")
    caller = Caller([controller.url], "hello")
    caller.more()
    redis_server.kill()
    caller.more(100)
    refused = controller.http.get("/api/v1/invocations")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "unavailable"
    redis_server.start()
    wait_until(lambda: status(controller)["redis"] == "ok", 3)
    caller.more()
    caller.stop()
    assert set(caller.answers) == {200}
    ids = set(caller.ids)
    wait_until(lambda: {row["id"] for row in _all_rows(redis_server)} >= ids, what="every call in the ledger")
    rows = [row["id"] for row in _all_rows(redis_server)]
    assert len(rows) == len(set(rows)), "each call once"
    controller.deploy("later")
    assert controller.http.get("/fn/later").status_code == 200


def _all_rows(redis_server: RedisServer) -> list[dict[str, Any]]:
    with redis_server.client() as client:
        entries: Any = client.xrange(keys.LEDGER)
        return [msgspec.json.decode(fields[b"row"]) for _, fields in entries]


def test_a_killed_controller_goes_on_where_it_was(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    controller.deploy("hello", concurrency=4)
    controller.http.get("/fn/hello")
    caller = Caller([controller.url], "hello")
    caller.more()
    controller.kill()
    controller.start()
    caller.more()
    caller.stop()
    assert set(caller.answers) == {200}
    assert len(node.ordered()) == 1, "the worker from before is used on"
    wait_until(lambda: {row["id"] for row in _all_rows(redis_server)} >= set(caller.ids))
    rows = [row["id"] for row in _all_rows(redis_server)]
    assert len(rows) == len(set(rows))
    controller.deploy("later")
    assert controller.http.get("/fn/later").status_code == 200, "it schedules again"


def states(controller: ControllerProcess, function: str) -> list[str]:
    return [worker["state"] for worker in controller.http.get(f"/api/v1/functions/{function}").json()["workers"]]


def test_the_other_controller_takes_over(
    controller: ControllerProcess, second: ControllerProcess, node: HandNode
) -> None:
    both = {status(c)["gateway"]: c for c in (controller, second)}
    leader = both[wait_until(lambda: (name := status(controller)["leader"]) in both and name, what="a leader")]
    other = second if leader is controller else controller
    other.deploy("hello")
    assert leader.http.get("/fn/hello").status_code == 200
    wait_until(lambda: "ready" in states(other, "hello"), what="word of the worker at the other controller")
    assert other.http.get("/fn/hello").headers["fs-start"] == "hot"
    leader.kill()
    other.deploy("later")
    assert other.http.get("/fn/later").status_code == 200
    assert status(other)["leader"] == status(other)["gateway"]


def test_a_call_at_one_controller_is_scheduled_by_the_other(
    controller: ControllerProcess, second: ControllerProcess, node: HandNode
) -> None:
    both = {status(c)["gateway"]: c for c in (controller, second)}
    leader = both[wait_until(lambda: (name := status(controller)["leader"]) in both and name, what="a leader")]
    follower = second if leader is controller else controller
    follower.deploy("hello", scale={"max": 2}, concurrency=1)
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda c: c.http.get("/fn/hello/sleep?s=0.2").status_code, [follower, leader, follower, leader])
        )
    assert answers == [200] * 4
    assert len(node.ordered()) <= 2
    assert all(app.most == 1 for app in node.apps.values())


def test_sigterm_lets_calls_end_and_writes_their_rows(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    controller.deploy("hello")
    controller.http.get("/fn/hello")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(controller.http.get, "/fn/hello/hold", headers={"x-request-id": "last"})
        app = next(iter(node.apps.values()))
        wait_until(lambda: len(app.calls) == 2)
        assert controller.process is not None
        controller.process.terminate()
        app.release.set()
        assert answer.result(10).status_code == 200
    assert controller.process.wait(10) == 0, controller.log()
    assert "last" in [row["request_id"] for row in _all_rows(redis_server)]
    with redis_server.client() as client:
        assert client.get(keys.LEADER) is None
        assert not client.exists(keys.OPEN)


@pytest.fixture
def impatient(redis_url: str, node: HandNode, tmp_path: Path) -> Iterator[ControllerProcess]:
    """A controller that drains for one second, with a ready worker of the function `hello`."""
    process = ControllerProcess(tmp_path / "impatient", redis_url, FS_DRAIN_S="1")
    try:
        process.start().deploy("hello")
        process.http.get("/fn/hello")
        yield process
    finally:
        process.close()


def _assert_ended_once(controller: ControllerProcess, redis_server: RedisServer, status: int) -> None:
    """The controller has exited with 0, and the call `last` has one row, unbilled, with the code `unavailable`."""
    assert controller.process is not None
    assert controller.process.wait(10) == 0, controller.log()
    ended = [row for row in _all_rows(redis_server) if row["request_id"] == "last"]
    assert [(row["status"], row["error"], row["cost_nusd"]) for row in ended] == [(status, "unavailable", 0)]
    with redis_server.client() as client:
        assert not client.exists(keys.OPEN)


def test_a_stream_that_outlives_the_drain_time_ends_with_an_error(
    impatient: ControllerProcess, redis_server: RedisServer
) -> None:
    with impatient.http.stream("GET", "/fn/hello/gate", headers={"x-request-id": "last"}) as response:
        pieces = response.iter_text()
        received = next(pieces)
        assert impatient.process is not None
        impatient.process.terminate()
        received += "".join(pieces)
    events = [line for line in received.splitlines() if line.startswith(("event: ", "data: first", "data: second"))]
    assert events == ["data: first", "event: error", "event: fleetstart"], received
    assert '"code":"unavailable"' in received
    _assert_ended_once(impatient, redis_server, status=200)


def test_a_call_that_outlives_the_drain_time_is_answered_unavailable(
    impatient: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(impatient.http.get, "/fn/hello/hold", headers={"x-request-id": "last"})
        app = next(iter(node.apps.values()))
        wait_until(lambda: len(app.calls) == 2)
        assert impatient.process is not None
        impatient.process.terminate()
        assert answer.result(10).status_code == 503
    assert answer.result().json()["error"]["code"] == "unavailable"
    _assert_ended_once(impatient, redis_server, status=503)


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

        async def read_nodes(nodes: list[NodeId]) -> Any:
            found = await read(nodes)
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


def test_a_lost_node_is_replaced_by_another(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer, tmp_path: Path
) -> None:
    controller.deploy("hello")
    controller.http.get("/fn/hello")
    other = HandNode(redis_server, "node-2").start()
    try:
        node.close()
        answer = controller.http.get("/fn/hello")
        assert answer.status_code == 200
        assert len(other.ordered()) == 1
    finally:
        other.close()


def test_a_restarted_node_is_told_again(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    controller.http.get("/fn/hello")
    first = node.ordered()[0]
    node.epoch = "e2"
    node.end_server(first.worker)
    node.say(first, "gone")
    assert controller.http.get("/fn/hello").status_code == 200
    assert node.ordered()[1].epoch in ("e1", "e2")
