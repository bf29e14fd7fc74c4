"""What a deploy is refused for by the state of the system, and not by its spec alone."""

from __future__ import annotations

import pytest

from fleetstart.controller.auth.deploy_policy import check_kv_memory
from fleetstart.controller.state.view import NodeSeen, View
from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.spec import FunctionSpec, LLMSettings
from fleetstart.runtime.contract.ids import CheckpointId, NodeId
from fleetstart.runtime.contract.node.reports import NodeReport
from fleetstart.runtime.contract.sizes import MIB
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
