"""Async invocations whose gateway ends, and whose Redis forgets: another takes them over, and each is billed once."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import InvocationId
from tests.controller.async_invocations.conftest import Client
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import RedisServer, wait_until


@pytest.fixture
def second(redis_url: str, controller: ControllerProcess) -> Iterator[ControllerProcess]:
    other = ControllerProcess(controller.home.parent / "home2", redis_url, FS_STORE=str(controller.home / "store"))
    try:
        yield other.start()
    finally:
        other.close()


def test_a_killed_gateways_call_is_taken_over_and_billed_once(
    controller: ControllerProcess, second: ControllerProcess, node: HandNode, calls: Client, redis_server: RedisServer
) -> None:
    controller.deploy("hello")
    invocation = calls.accepted("hello/hold")
    others = Client(second)
    info = others.until(invocation, "running")
    wait_until(lambda: any(app.running for app in node.apps.values()))
    with redis_server.client() as client:
        gateway = json.loads(client.hget(keys.invocation(InvocationId(invocation)), "state") or b"")["gateway"]
    mine = controller.http.get("/api/v1/status").json()["gateway"] == gateway
    killed, survivor = (controller, others) if mine else (second, calls)
    killed.kill()
    wait_until(lambda: any(len(app.calls) > 1 for app in node.apps.values()) or len(node.apps) > 1, 20)
    for app in list(node.apps.values()):
        app.release.set()
    ended = survivor.until(invocation, "succeeded", deadline_s=20)
    assert "taken over from a dead gateway" in [moment["what"] for moment in ended["history"]]
    assert info["id"] == ended["id"]
    served = wait_until(
        lambda: [row["id"] for row in survivor.rows_of("hello") if row["status"] == 200], what="its row"
    )
    assert served == [invocation]


def test_a_controller_that_is_alone_finds_its_calls_again(
    controller: ControllerProcess, node: HandNode, calls: Client
) -> None:
    controller.deploy("hello")
    waiting = [calls.accepted("hello/echo", b"%d" % number) for number in range(5)]
    controller.kill()
    controller.start()
    for number, invocation in enumerate(waiting):
        assert calls.until(invocation, "succeeded", deadline_s=20)["result"]["body"] == str(number)


def test_what_redis_forgot_is_taken_up_from_the_store(
    controller: ControllerProcess, node: HandNode, calls: Client, redis_server: RedisServer
) -> None:
    controller.deploy("hello")
    done = calls.accepted("hello/echo", b"one")
    calls.until(done, "succeeded")
    with redis_server.client() as client:
        for key in client.keys("fs:invocation*"):
            client.delete(key)
    wait_until(lambda: [one["id"] for one in calls.listed()] == [done], 25, what="the store to be compared")
    assert calls.until(done, "succeeded")["result"]["body"] == "one"
