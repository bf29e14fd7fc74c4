"""Workers on CPU devices of a real daemon: bound, limited, packed, and their devices given back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetstart.runtime.contract.node.devices import DeviceId, DeviceShare
from fleetstart.runtime.contract.node.orders import WorkerStatus
from fleetstart.runtime.contract.sizes import MIB
from tests.prefetcher.nodes import Node, Store, call, spec_of
from tests.servers import RedisServer, wait_until

SEEN = """
import os

def seen() -> dict:
    names = ("FS_WORKER_DEVICES", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    return {"cores": sorted(os.sched_getaffinity(0)), **{name: os.environ.get(name) for name in names}}
"""
CPU0, CPU1 = DeviceId("cpu:0"), DeviceId("cpu:1")


@pytest.fixture
def device_node(redis_server: RedisServer, store: Store, tmp_path: Path) -> Iterator[Node]:
    node = Node(redis_server, str(store.folder), tmp_path / "home", FS_DEVICES="cpu:2x256MiB")
    try:
        yield node.start()
    finally:
        node.close()


def seen_by(status: WorkerStatus) -> dict[str, object]:
    answered = call(status)
    assert answered[0] == 200, answered
    found: dict[str, object] = json.loads(answered[1])
    return found


def reserved(node: Node) -> dict[str, int]:
    return {device.id: device.reserved_bytes for device in node.lease().devices}


def test_workers_are_bound_to_their_devices_which_are_reserved_until_they_end(device_node: Node, store: Store) -> None:
    node, spec = (
        device_node,
        spec_of(store.put_bundle({"handler.py": SEEN}), entry="handler:seen", memory_bytes=32 * MIB),
    )
    inventory = node.lease().devices
    assert [(device.id, device.type, device.memory_bytes) for device in inventory] == [
        ("cpu:0", "cpu", 256 * MIB), ("cpu:1", "cpu", 256 * MIB),
    ]  # fmt: skip
    assert sorted({core for device in inventory for core in device.cores}) == sorted(os.sched_getaffinity(0))

    shares = [(DeviceShare(CPU1, 96 * MIB),), (DeviceShare(CPU1, 96 * MIB),), ()]
    workers = [node.order(spec, devices=one) for one in shares]
    first, second, hosted = [seen_by(node.wait_for(worker, "ready")) for worker in workers]

    cores = sorted(inventory[1].cores)
    bound = {
        "cores": cores, "FS_WORKER_DEVICES": "cpu:1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(len(cores)),
    }  # fmt: skip
    assert first == second == bound
    assert hosted["FS_WORKER_DEVICES"] == ""
    assert hosted["cores"] == sorted(os.sched_getaffinity(0))
    wait_until(lambda: reserved(node) == {CPU0: 0, CPU1: 192 * MIB}, what="the reservations in the report")

    late = node.order(spec, devices=(DeviceShare(CPU1, 96 * MIB),))
    refused = node.wait_for(late, "failed")
    assert refused.error is not None
    assert refused.error.code == "unavailable"
    assert "cpu:1 has 64 of 256 MiB free" in refused.error.message

    node.take_back(workers[0])
    node.wait_for(workers[0], "gone")
    wait_until(lambda: reserved(node) == {CPU0: 0, CPU1: 96 * MIB}, what="the end of a reservation")
    assert node.wait_for(node.order(spec, devices=(DeviceShare(CPU1, 160 * MIB),)), "ready")
