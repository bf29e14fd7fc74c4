"""Feasibility: waiting calls that may wait on, and those that are failed at once."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetstart.controller.gateway.admission.feasibility import FeasibilityCheck, start_failure
from fleetstart.controller.gateway.dispatch.version_backend import VersionBackend
from fleetstart.controller.scheduler.start_orders import UNPLACED_NS
from fleetstart.controller.state.records import Failure, VersionKey, VersionRecord
from fleetstart.controller.state.view import NodeSeen
from fleetstart.runtime.contract.errors import ErrorInfo, NotFound
from fleetstart.runtime.contract.function.spec import SLO, LLMSettings
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.node.reports import SegmentReport
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.weights.stage import LayerLayout
from tests.controller.gateway.dispatch.test_version_backend import status
from tests.controller.scheduler.cluster import Cluster, F

KEY = VersionKey(F, Version(1))
CHAT = CheckpointId("c" * 64)
BAD = Failure(count=3, last_unix_ms=0, error=ErrorInfo(code="start_failed", message="OSError: bad day"))
DAY = 24 * 3600 * 1_000_000_000


def deployed(cluster: Cluster, memory_mib: int = 64, layer_mib: int = 0, **fields: Any) -> VersionBackend:
    """A deployed version, with weights of eight layers unless `layer_mib` is 0."""
    weights: dict[str, Any] = {"weights": CHAT, "llm": LLMSettings(kv_memory_bytes=MIB)} if layer_mib else {}
    spec = cluster.deploy(memory_bytes=memory_mib * MIB, **weights, **fields)
    layout = LayerLayout(0, [layer_mib * MIB] * 8, [(layer, layer + 1) for layer in range(8)]) if layer_mib else None
    record = VersionRecord(
        version=KEY.version, digest="", spec=spec, segment_bytes=8 * layer_mib * MIB, created_unix_ms=0, layout=layout
    )
    cluster.view.versions[KEY] = record
    cluster.view.redis = "ok"
    return VersionBackend(KEY, record, elsewhere=lambda _: 0, later=lambda *_: None)


def test_calls_wait_while_a_node_has_room_or_a_worker_is_on_its_way() -> None:
    cluster = Cluster()
    backend, feasibility = deployed(cluster), FeasibilityCheck(cluster.view)
    assert feasibility.unschedulable(backend, 0, 0) is None
    cluster.load(1)
    cluster.step()
    cluster.view.nodes.clear()
    cluster.view.synced = False  # nobody knows yet that the node is lost
    assert feasibility.unschedulable(backend, DAY, 0) is None


def test_a_deleted_function_ends_the_wait() -> None:
    cluster = Cluster()
    backend, feasibility = deployed(cluster), FeasibilityCheck(cluster.view)
    cluster.view.functions.clear()
    ended = feasibility.unschedulable(backend, 5, 0)
    assert ended is not None
    assert isinstance(ended[0], NotFound)
    assert ended[1] == 5, "all who wait now"


def test_a_function_too_large_for_every_node_ends_it_at_once() -> None:
    cluster = Cluster(memory_mib=1024)
    backend, feasibility = deployed(cluster, memory_mib=4096), FeasibilityCheck(cluster.view)
    ended = feasibility.unschedulable(backend, 5, 0)
    assert ended is not None
    assert "4096 MiB" in ended[0].message


def test_a_model_too_large_for_every_node_waits_if_a_pipeline_holds_it() -> None:
    cluster = Cluster(nodes=4, memory_mib=1024)
    backend, feasibility = deployed(cluster, layer_mib=200), FeasibilityCheck(cluster.view)
    assert feasibility.unschedulable(backend, 0, 0) is None, "two layers, 400 MiB, a node"
    backend, feasibility = deployed(cluster, layer_mib=600), FeasibilityCheck(cluster.view)
    ended = feasibility.unschedulable(backend, 5, 0)
    assert ended is not None
    assert "4864 MiB" in ended[0].message
    cluster.load(1)
    cluster.step()
    assert not cluster.view.orders, "as the scheduler finds"


def test_a_part_of_a_segment_is_not_the_whole() -> None:
    """Its missing bytes need room, and there is none until others have gone."""
    cluster = Cluster(memory_mib=1024)
    backend, feasibility = deployed(cluster, layer_mib=100), FeasibilityCheck(cluster.view)
    seen = cluster.view.nodes[NodeId("n0")]
    part = SegmentReport(CHAT, "partial", 800 * MIB, 100 * MIB, [(0, 1)])
    report = msgspec.structs.replace(seen.report, memory_used_bytes=400 * MIB, segments=[part])
    cluster.view.nodes[NodeId("n0")] = NodeSeen(report)
    assert feasibility.unschedulable(backend, 0, 0) is None, "it waits"
    ended = feasibility.unschedulable(backend, UNPLACED_NS + 1, 0)
    assert ended is not None
    assert ended[1] == 1


def test_links_that_are_promised_to_others_are_no_lack_of_room() -> None:
    cluster = Cluster()
    backend, feasibility = deployed(cluster, layer_mib=100, slo=SLO(ttft_s=9)), FeasibilityCheck(cluster.view)
    other = msgspec.structs.replace(backend.spec, name=FunctionName("other"), weights=CheckpointId("d" * 64))
    cluster.view.versions[VersionKey(other.name, Version(1))] = msgspec.structs.replace(backend.record, spec=other)
    cluster.view.put_order(
        WorkerOrder(
            worker=WorkerId("o"), node=NodeId("n0"), epoch="e", version=Version(1), spec=other,
            ordered_unix_ns=0, fetch_by_unix_ns=cluster.clock.unix_ns() + round(6.8e9),
        )
    )  # fmt: skip
    cluster.load(1)
    assert "until other cold starts have fetched" in cluster.step().unplaced[KEY].message
    for now_ns in (0, UNPLACED_NS + 1):
        assert feasibility.unschedulable(backend, now_ns, 0) is None


def test_without_a_node_calls_wait_for_its_return_but_not_for_ever() -> None:
    cluster = Cluster(nodes=0)
    backend, feasibility = deployed(cluster), FeasibilityCheck(cluster.view)
    assert feasibility.unschedulable(backend, 0, 0) is None
    assert feasibility.unschedulable(backend, UNPLACED_NS, 0) is None
    ended = feasibility.unschedulable(backend, UNPLACED_NS + 1, 0)
    assert ended is not None
    assert ended[1] == 1, "those who came later have not waited as long"
    cluster.view.redis = "away"
    assert feasibility.unschedulable(backend, DAY, 0) is None, "nothing is known of nodes while Redis is away"
    assert feasibility.unschedulable(backend, DAY + UNPLACED_NS, 0) is None, "and the wait begins anew"


def test_in_a_region_without_nodes_calls_wait_for_one_but_not_for_ever() -> None:
    cluster = Cluster()
    backend, feasibility = deployed(cluster, region=["eu"]), FeasibilityCheck(cluster.view)
    assert feasibility.unschedulable(backend, 0, 0) is None, "it may be about to come back"
    ended = feasibility.unschedulable(backend, UNPLACED_NS + 1, 0)
    assert ended is not None
    assert ended[0].status == 503
    assert "it may run in eu, and no node is there: 1 node is in no region" in ended[0].message


def test_given_up_starts_are_told_unless_a_worker_from_before_still_serves() -> None:
    cluster = Cluster()
    backend, feasibility = deployed(cluster), FeasibilityCheck(cluster.view)
    cluster.view.failures[KEY] = BAD
    error = start_failure(cluster.view, backend, 1000)
    assert error is not None
    assert error.message == "OSError: bad day"
    assert "fs logs f" in error.hint
    assert feasibility.unschedulable(backend, 7, 1000) is not None
    assert start_failure(cluster.view, backend, 61_000) is None, "tried again after a minute"
    backend.on_status(status("a"), 0)
    assert start_failure(cluster.view, backend, 1000) is None
