"""Sources and copies through a real controller and Redis, with nodes that the test drives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fleetstart.prefetcher.workers.secrets import SecretDecryptor
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.node.peers import SealedPeerKey, grant_secret
from fleetstart.runtime.contract.node.reports import SegmentReport
from fleetstart.runtime.contract.record_decoder import RecordDecoder
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.weights.manifest import checkpoint_id, manifest_bytes
from tests.controller.conftest import ControllerProcess, HandNode
from tests.controller.manifests import manifest, objects_of
from tests.servers import RedisServer, wait_until

BUSY_S = 40.0
"""Deadline for what takes some seconds on an idle machine."""


@pytest.fixture
def decryptor() -> SecretDecryptor:
    """The key pair of all nodes."""
    return SecretDecryptor()


@pytest.fixture
def three(
    redis_server: RedisServer, controller: ControllerProcess, decryptor: SecretDecryptor
) -> Iterator[list[HandNode]]:
    nodes = [HandNode(redis_server, f"n{number}") for number in range(3)]
    for node in nodes:
        node.peer_address = f"{node.name}:7000"
        node.public_key = decryptor.public_key
        node.answer = lambda node, order: node.say(order, "starting")
        node.start()
    wait_until(lambda: len(controller.http.get("/api/v1/status").json()["nodes"]) == 3, BUSY_S, what="three nodes")
    yield nodes
    for node in nodes:
        node.close()


def pushed(controller: ControllerProcess) -> CheckpointId:
    data = manifest_bytes(manifest())
    for key, content in objects_of(data).items():
        controller.http.put(f"/api/v1/objects/{key}", content=content).raise_for_status()
    return checkpoint_id(data)


def ready(checkpoint: CheckpointId) -> list[SegmentReport]:
    return [SegmentReport(checkpoint, "ready", 4096, 4096, [(0, 1)])]


def copied(nodes: list[HandNode]) -> list[HandNode]:
    return [node for node in nodes if node.copies]


@pytest.mark.slow
def test_a_cold_start_names_the_copy_which_is_made_anew_when_its_node_is_lost(
    controller: ControllerProcess, three: list[HandNode], redis_server: RedisServer, decryptor: SecretDecryptor
) -> None:
    """One test of the whole way, because each costs a controller."""
    checkpoint = pushed(controller)
    controller.deploy("f", weights=checkpoint, keep="host")
    wait_until(lambda: len(copied(three)) == 1, BUSY_S, what="a copy")
    [first] = copied(three)
    assert first.copies[checkpoint].peers == ()
    first.segments = lambda: ready(checkpoint)
    first.memory_bytes = 64 * MIB  # it has no room for workers: the planner would take the node that has the weights
    wait_until(lambda: _memory_bytes(controller, first) == 64 * MIB, BUSY_S, what="a small node")
    _waits_for_a_worker(controller)

    [order] = wait_until(lambda: _named(three, first), BUSY_S, what="an order that names the holder")
    [peer] = order.sources
    sealed = RecordDecoder(SealedPeerKey).decode(bytes(_stored(redis_server, first)))
    assert peer.secret == grant_secret(peer.grant, decryptor.peer_key(sealed.sealed, first.name, first.epoch))
    assert (peer.grant.reader, peer.ranges) == (order.node, ((0, 1),))

    first.close()
    others = [node for node in three if node is not first]
    [second] = wait_until(lambda: copied(others), BUSY_S, what="another copy")
    wait_until(lambda: not _named(three, first), BUSY_S, what="orders without the lost node")
    second.segments = lambda: ready(checkpoint)
    with redis_server.client() as client:
        assert not client.exists(keys.copies(first.name))
    controller.http.delete("/api/v1/functions/f").raise_for_status()
    wait_until(lambda: not copied(others), BUSY_S, what="no copy of a function that is gone")


def _waits_for_a_worker(controller: ControllerProcess) -> None:
    """A call that is not waited for."""
    controller.http.post("/fn/f", json={}, headers={"Prefer": "respond-async"}).raise_for_status()


def _named(nodes: list[HandNode], holder: HandNode) -> list[WorkerOrder]:
    """The orders in Redis that name the holder."""
    orders = [order for node in nodes if not node.closed for order in node.latest.values()]
    return [order for order in orders if any(peer.node == holder.name for peer in order.sources)]


def _memory_bytes(controller: ControllerProcess, node: HandNode) -> int:
    told = {one["node"]: one["memory_bytes"] for one in controller.http.get("/api/v1/status").json()["nodes"]}
    return int(told[node.name])


def _stored(redis_server: RedisServer, node: HandNode) -> Any:
    with redis_server.client() as client:
        return client.get(keys.peer_key(node.name))
