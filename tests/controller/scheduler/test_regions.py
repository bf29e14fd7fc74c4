"""Two nodes that differ and a real controller: who gets the orders, and what is said where nobody can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fleetstart.controller.shell.service import select_node
from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.reports import NodeReport
from fleetstart.runtime.contract.sizes import MIB
from tests.controller.conftest import BUNDLE_ID, ControllerProcess, HandNode
from tests.controller.scheduler.test_autoscaler import spec
from tests.servers import RedisServer, wait_until


@pytest.fixture
def two(redis_server: RedisServer, controller: ControllerProcess) -> Iterator[list[HandNode]]:
    """The first has four times the other's memory."""
    nodes = [HandNode(redis_server, name, memory_mib * MIB) for name, memory_mib in (("big", 4096), ("small", 1024))]
    for node, region in zip(nodes, ("us", "eu"), strict=True):
        node.region = region
        node.isolations = ["gvisor"] if region == "eu" else []
        node.start()
    wait_until(lambda: len(controller.http.get("/api/v1/status").json()["nodes"]) == 2, what="two nodes")
    yield nodes
    for node in nodes:
        node.close()


def test_calls_run_where_their_function_may(controller: ControllerProcess, two: list[HandNode]) -> None:
    big, small = two
    assert controller.deploy("here", region=["eu", "asia"])["warning"] == ""

    assert controller.http.post("/fn/here", json={}).status_code == 200
    assert [order.spec.name for order in small.ordered()] == ["here"]
    assert big.ordered() == []
    told = {node["node"]: node["region"] for node in controller.http.get("/api/v1/status").json()["nodes"]}
    assert told == {"big": "us", "small": "eu"}


def test_a_sandbox_is_ordered_where_there_are_such(controller: ControllerProcess, two: list[HandNode]) -> None:
    big, small = two
    assert controller.deploy("shut", isolation="gvisor")["warning"] == ""
    assert controller.http.post("/fn/shut", json={}).status_code == 200
    assert [order.spec.isolation for order in small.ordered()] == ["gvisor"]
    assert big.ordered() == []


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"region": ["moon"]}, "it may run in moon, and no node is there: 1 node is in eu, 1 in us"),
        ({"region": ["us"], "isolation": "gvisor"}, "it asks for isolation gvisor, which the node in us has not"),
    ],
)
def test_where_no_node_is_a_deploy_warns_and_calls_are_told(
    controller: ControllerProcess, two: list[HandNode], asked: dict[str, Any], why: str
) -> None:
    fields = {"name": "far", "bundle": BUNDLE_ID, "entry": "handler:run", **asked}
    foreseen = controller.http.post("/api/v1/forecast", json={"spec": fields}).json()
    assert why in foreseen["explanation"]["plan"]["error"]["message"]

    assert why in controller.deploy("far", **asked)["warning"]

    answer = controller.http.post("/fn/far", json={}, timeout=40)
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert why in error["message"]
    assert ("runsc" in error["hint"]) == ("isolation" in asked)
    assert not two[0].ordered()
    assert not two[1].ordered()


def test_a_shell_opens_where_its_function_may_run() -> None:
    def report(name: str, region: str, memory_mib: int, *isolations: str) -> NodeReport:
        return NodeReport(
            node=NodeId(name), epoch="e", address="", memory_bytes=memory_mib * MIB, memory_used_bytes=0, cpus=1,
            profiles=["python", "python+gvisor"], isolations=list(isolations), region=region,
        )  # fmt: skip

    nodes = [
        report("a", "us", 8192),
        report("b", "eu", 4096),
        report("c", "", 9999),
        report("d", "", 99, "gvisor"),
    ]
    assert select_node(spec(region=["eu"]), nodes).node == "b"
    assert select_node(spec(), nodes).node == "c"
    assert select_node(spec(isolation="gvisor", memory_bytes=16 * MIB), nodes).node == "d"
    with pytest.raises(Unavailable, match="1 node is in eu, 1 in us, 2 in no region"):
        select_node(spec(region=["asia"]), nodes)
