"""What a deploy is refused for by the state of the system, and not by its spec alone."""

from __future__ import annotations

import msgspec
import pytest

from fleetstart.controller.auth.deploy_policy import check_devices, check_kv_memory
from fleetstart.controller.state.view import NodeSeen, View
from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.spec import FunctionSpec, LLMSettings
from fleetstart.runtime.contract.ids import CheckpointId, NodeId
from fleetstart.runtime.contract.node.devices import DeviceId, DeviceKind, DeviceReport, parse_request
from fleetstart.runtime.contract.node.reports import NodeReport
from fleetstart.runtime.contract.sizes import GIB, MIB
from tests.controller.scheduler.test_autoscaler import spec


def model(kv_mib: int, memory_mib: int) -> FunctionSpec:
    return spec(
        weights=CheckpointId("0" * 64), llm=LLMSettings(kv_memory_bytes=kv_mib * MIB), memory_bytes=memory_mib * MIB
    )


def view_of(*gpus: int) -> View:
    view = View()
    for index, count in enumerate(gpus):
        report = NodeReport(
            node=NodeId(f"n{index}"), epoch="e", address="", memory_bytes=1, memory_used_bytes=0, cpus=1, gpus=count
        )
        view.nodes[report.node] = NodeSeen(report)
    return view


@pytest.mark.parametrize("view", [view_of(), view_of(0, 0)])
def test_a_cache_must_fit_into_the_memory_where_no_node_has_a_gpu(view: View) -> None:
    check_kv_memory(view, spec())
    check_kv_memory(view, model(496, 512))
    with pytest.raises(InvalidSpec, match="kv_memory is 497 MiB and lies in the worker's memory of 512 MiB"):
        check_kv_memory(view, model(497, 512))
    with pytest.raises(InvalidSpec) as raised:
        check_kv_memory(view, model(4096, 2048))
    assert "6144 MiB" in raised.value.hint


def test_on_a_gpu_the_cache_is_in_device_memory() -> None:
    check_kv_memory(view_of(0, 1), model(4096, 64))


def device(at: int, kind: DeviceKind, name: str, gib: int) -> DeviceReport:
    return DeviceReport(id=DeviceId(f"{kind}:{at}"), kind=kind, type=name, memory_bytes=gib * GIB)


def with_devices(*nodes: tuple[DeviceReport, ...]) -> View:
    view = view_of(*(0 for _ in nodes))
    for index, devices in enumerate(nodes):
        node = NodeId(f"n{index}")
        view.nodes[node] = NodeSeen(msgspec.structs.replace(view.nodes[node].report, devices=devices))
    return view


@pytest.mark.parametrize("request_", [1, "H100", "H100:2", "80GiB", "cpu:4GiB", "cpu"])
def test_devices_that_some_node_has_are_granted(request_: object) -> None:
    check_devices(NODES, spec(gpu=parse_request(request_)))


@pytest.mark.parametrize("request_", ["H200", 3, "H100:3", "81GiB", "cpu:5GiB", "cpu:2"])
def test_devices_that_no_node_could_ever_give_are_refused_with_those_that_there_are(request_: object) -> None:
    with pytest.raises(InvalidSpec, match="n1 has 2 × H100 of 80 GiB, n2 has 1 × cpu of 4 GiB, n0 has none"):
        check_devices(NODES, spec(gpu=parse_request(request_)))
    check_devices(View(), spec(gpu=parse_request(request_)))  # nodes that are not up yet may have them


def test_reserved_devices_count_as_there() -> None:
    taken = msgspec.structs.replace(device(0, "cuda", "H100", 80), reserved_bytes=80 * GIB)
    check_devices(with_devices((taken,)), spec(gpu=parse_request(1)))


NODES = with_devices((), (device(0, "cuda", "H100", 80), device(1, "cuda", "H100", 80)), (device(0, "cpu", "cpu", 4),))
