"""Records of another release beside ours: read as far as they are understood, skipped and shown where they are not."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import msgspec

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import FunctionName, NodeId, Version
from tests.controller.auth.test_keys import anybody, bearer, lock, make
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import RedisServer, wait_until

BROKEN = b'{"of_a_later_release":'
HELLO = FunctionName("hello")


def changed(raw: Any, **fields: object) -> bytes:
    return json.dumps({**json.loads(raw), **fields}).encode()


def status(controller: ControllerProcess) -> dict[str, Any]:
    return dict(controller.http.get("/api/v1/status").json())


def skipped(controller: ControllerProcess) -> set[tuple[str, str]]:
    return {(one["kind"], one["name"]) for one in status(controller)["unreadable"]}


def test_what_is_not_understood_stops_no_reading_and_a_revoked_key_is_refused_beside_it(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    controller.deploy("hello")
    assert controller.http.get("/fn/hello").status_code == 200
    lock(controller)
    app = make(controller, "app", ["invoke"])
    assert controller.http.put("/api/v1/budgets/hello", json={"limit_nusd": 1, "per": "day"}).status_code == 200
    with redis_server.client() as client:
        version: Any = client.hget(keys.versions(HELLO), "1")
        function: Any = client.hget(keys.FUNCTIONS, "hello")
        spec = json.loads(version)["spec"]
        client.hset(keys.FUNCTIONS, "newer", changed(function, name="newer", later={"a": 1}))
        client.hset(
            keys.versions(FunctionName("newer")), "1", changed(version, spec={**spec, "name": "newer", "later": 1})
        )
        client.hset(keys.FUNCTIONS, "odd", changed(function, name="odd"))
        client.hset(
            keys.versions(FunctionName("odd")), "1", changed(version, spec={**spec, "name": "odd", "isolation": "vm"})
        )
        client.hset(keys.FUNCTIONS, "torn", BROKEN)
        client.hset(keys.NODES, "later", "1")
        client.set(keys.node(NodeId("later")), BROKEN)
        client.hset(keys.desired(NodeId("later")), "w1", BROKEN)
        client.hset(keys.observed(NodeId("later")), "w1", BROKEN)
        client.hset(keys.failures(HELLO, Version(1)), mapping={"count": "many", "last_unix_ms": "0", "error": "{}"})
        client.hset(keys.BUDGETS, "newer", BROKEN)
        client.hset(keys.OPEN, "call-of-a-later-release", BROKEN)
        client.hset(keys.PRICES, "99", BROKEN)
        client.hset(keys.KEYS, "odd", BROKEN)
        client.hset(keys.SECRETS, "default/ODD", BROKEN)
        client.hset(keys.SCHEDULES, "hello", BROKEN)
        for channel in (keys.EVENTS_OBSERVED, keys.EVENTS_GATEWAYS, keys.events_desired(NodeId("later"))):
            client.publish(channel, BROKEN)
        client.publish(keys.EVENTS_FUNCTIONS, "newer")
    expected = {
        ("version", "odd@1"), ("function", "torn"), ("node", "later"), ("order", "w1"), ("status", "w1"),
        ("failure", "hello@1"), ("budget", "newer"), ("price sheet", "99"), ("key", "odd"), ("secret", "default/ODD"),
        ("publication", keys.EVENTS_OBSERVED), ("open call", "call-of-a-later-release"),
    }  # fmt: skip
    wait_until(lambda: skipped(controller) >= expected, 15, what="all that is skipped")

    assert controller.http.delete("/api/v1/keys/app").json()["state"] == "revoked"
    with anybody(controller) as stranger:
        assert stranger.get("/fn/hello", headers=bearer(app)).status_code == 401
        ready = stranger.get("/readyz")
        assert (ready.status_code, ready.json()) == (200, {"ready": True, "problems": []})
    controller.deploy("later")
    assert controller.http.get("/fn/later").status_code == 200, "it schedules"
    assert controller.http.get("/fn/newer").status_code == 200, "unknown fields alone are no obstacle"
    refused = controller.http.get("/fn/odd")
    assert refused.status_code == 503
    assert "cannot be read by this release" in refused.json()["error"]["message"]
    assert {one["name"] for one in controller.http.get("/api/v1/functions").json()} == {"hello", "newer", "later"}
    assert controller.http.delete("/api/v1/functions/odd").status_code == 200, "what is odd can be removed"
    metrics = controller.http.get("/metrics").text
    assert 'fleetstart_unreadable_records{kind="order"} 1' in metrics
    told = [line for line in controller.log().splitlines() if "cannot be read" in line and '"w1"' in line]
    assert len(told) == 2, "the order and the status, each once"
    assert "background task failed" not in controller.log()


def test_workers_of_a_function_that_is_no_longer_understood_are_left_alone(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    controller.deploy("hello", scale={"min": 1, "max": 2})
    wait_until(lambda: len(node.statuses) == 1 and all(s.state == "ready" for s in node.statuses.values()))
    with redis_server.client() as client:
        client.hset(keys.FUNCTIONS, "hello", BROKEN)
        client.publish(keys.EVENTS_FUNCTIONS, "hello")
        wait_until(lambda: ("function", "hello") in skipped(controller))
        assert controller.http.get("/fn/hello").headers["fs-start"] == "hot", "what was read before is still good"
        controller.kill()
        controller.start()  # this one never read it
        wait_until(lambda: ("function", "hello") in skipped(controller))
        controller.deploy("later")
        assert controller.http.get("/fn/later").status_code == 200, "steps were made"
        assert [order.wanted for order in node.orders if order.spec.name == "hello"] == ["run"]
        assert controller.http.get("/fn/hello").status_code == 503


def test_nodes_whose_reports_are_not_understood_keep_their_workers(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    controller.deploy("hello", scale={"min": 1, "max": 1})
    wait_until(lambda: len(node.statuses) == 1 and all(s.state == "ready" for s in node.statuses.values()))
    with redis_server.client() as client:
        node.report = lambda report: BROKEN
        wait_until(lambda: ("node", node.name) in skipped(controller))
        controller.kill()
        controller.start()
        wait_until(lambda: ("node", node.name) in skipped(controller))
        assert controller.http.get("/fn/hello").status_code == 200
        assert client.hlen(keys.desired(node.name)) == 1
    assert len(node.orders) == 1


def test_a_node_obeys_orders_of_a_later_release(redis_server: RedisServer) -> None:
    """What a node daemon decodes, with a field that it does not know, and one that it cannot read beside it."""
    import asyncio

    from fleetstart.prefetcher.control.redis_state import NodeState, connect
    from fleetstart.runtime.contract.node.orders import WorkerOrder
    from tests.runtime.contract.test_record_decoder import ORDER

    async def read() -> dict[Any, WorkerOrder]:
        state = NodeState(connect(redis_server.url), NodeId("n"))
        try:
            return await state.read_orders()
        finally:
            await state.close()

    with redis_server.client() as client:
        raw = msgspec.json.encode(ORDER)
        spec = json.loads(raw)["spec"]
        client.hset(keys.desired(NodeId("n")), "w", changed(raw, later=1, spec={**spec, "later": 1}))
        client.hset(keys.desired(NodeId("n")), "w2", BROKEN)
    assert list(asyncio.run(read()).values()) == [ORDER]


def test_readyz_tells_the_truth(controller: ControllerProcess, redis_server: RedisServer) -> None:
    def ready() -> dict[str, Any]:
        answer = controller.http.get("/readyz")
        told = dict(answer.json())
        assert (answer.status_code == 200) == told["ready"]
        return told

    assert wait_until(lambda: ready()["ready"])
    with redis_server.client() as client:
        client.config_set("maxmemory", "1")
        wait_until(lambda: "Redis takes no writes" in ready()["problems"], 15)
        assert controller.http.get("/healthz").status_code == 200, "the process itself is well"
        client.config_set("maxmemory", "0")
        wait_until(lambda: ready()["ready"], 15)
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: "Redis cannot be read" in ready()["problems"], 15)
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    wait_until(lambda: ready()["ready"], 15)


def test_a_redis_that_takes_no_writes_loses_no_node_and_hot_functions_go_on(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    # Of calls that become slower, as on a busy machine, a second worker is expected to be needed, and is ordered.
    controller.deploy("hello", scale={"max": 1})
    assert controller.http.get("/fn/hello").status_code == 200
    with redis_server.client() as client:
        client.config_set("maxmemory", "1")
        wait_until(lambda: not client.exists(keys.node(node.name)), 15, what="the node's lease to be over")
        ends = time.monotonic() + 7
        while time.monotonic() < ends:
            answer = controller.http.get("/fn/hello")
            assert (answer.status_code, answer.headers.get("fs-start")) == (200, "hot"), answer.text + controller.log()
        client.config_set("maxmemory", "0")
    wait_until(lambda: len(status(controller)["nodes"]) == 1 and controller.http.get("/readyz").is_success, 15)
    answer = controller.http.get("/fn/hello")
    assert (answer.status_code, answer.headers.get("fs-start")) == (200, "hot"), answer.text + controller.log()
    assert [order.wanted for order in node.orders] == ["run"], "its worker was neither ended nor replaced"
