"""What is told of copies: their states, and who has what in memory."""

from __future__ import annotations

import msgspec

from fleetstart.controller.cli.commands.status import node_lines
from fleetstart.controller.observability.cluster_metrics import families
from fleetstart.controller.peers.report import kept_states, nodes_with, reported_copies
from fleetstart.controller.schemas.nodes import CopyInfo
from fleetstart.controller.state.records import FunctionRecord, VersionKey
from fleetstart.runtime.contract.ids import FunctionName, NodeId
from tests.controller.peers.test_pool import CHECKPOINT, SIZE_BYTES, World


def kept(world: World) -> dict[str, float]:
    """The metric, by state."""
    found = families(world.view, [], 0, world.now_ns)
    family = next(one for one in found if one.name == "fleetstart_kept_checkpoints")
    return {sample.labels[0][1]: sample.value for sample in family.samples}


def test_a_kept_checkpoint_is_missing_then_fetched_then_there() -> None:
    world = World(2, keep="host")
    assert kept_states(world.view, world.now_ns) == {CHECKPOINT: "missing"}
    assert kept(world) == {"ready": 0, "fetching": 0, "missing": 1}
    world.step()
    [where] = world.copies()
    assert kept_states(world.view, world.now_ns) == {CHECKPOINT: "fetching"}
    world.holds(where, 8)
    [copy] = reported_copies(world.view, world.now_ns)
    assert (copy.state, copy.ready_bytes, copy.size_bytes) == ("fetching", SIZE_BYTES // 2, SIZE_BYTES)
    world.holds(where)
    assert kept_states(world.view, world.now_ns) == {CHECKPOINT: "ready"}
    assert nodes_with(world.view, world.now_ns) == {CHECKPOINT: [where]}
    world.dies(where)
    assert kept_states(world.view, world.now_ns + 3 * 10**9) == {CHECKPOINT: "missing"}


def test_fs_nodes_marks_kept_copies_also_those_to_come() -> None:
    world = World(1)
    report = world.view.nodes[NodeId("n0")].report
    copy = CopyInfo(node=report.node, checkpoint=CHECKPOINT, state="fetching", ready_bytes=0, size_bytes=0)
    assert f"{CHECKPOINT[:12]}   to be fetched   a kept copy" in node_lines(report, [copy])
    world.holds("n0")
    assert "ready   a kept copy" in node_lines(world.view.nodes[NodeId("n0")].report, [copy])
    assert "kept" not in node_lines(world.view.nodes[NodeId("n0")].report)


def test_fs_nodes_says_how_others_read_from_a_node() -> None:
    report = World(1).view.nodes[NodeId("n0")].report
    by_rdma = msgspec.structs.replace(report, peer_transports=("rdma", "tcp"))
    assert "others read from it over rdma or tcp" in node_lines(by_rdma)
    assert "read from it" not in node_lines(msgspec.structs.replace(report, peer_transports=()))


def test_functions_in_two_regions_keep_a_copy_in_each_and_one_that_is_nowhere_is_told() -> None:
    world = World(2, keep="host")
    for name, node, region in (("eu-chat", "n0", "eu"), ("us-chat", "n1", "us")):
        world.node(node, region=region)
        spec = msgspec.structs.replace(world.spec, name=FunctionName(name), region=[region])
        [known] = [one for key, one in world.view.versions.items() if key.name == world.spec.name]
        world.view.versions[VersionKey(spec.name, known.version)] = msgspec.structs.replace(known, spec=spec)
        world.view.functions[spec.name] = FunctionRecord(name=spec.name, live=known.version, deployed_unix_ms=0)
    del world.view.functions[world.spec.name]
    world.step()
    assert world.copies() == ["n0", "n1"]
    assert kept_states(world.view, world.now_ns) == {CHECKPOINT: "fetching"}
    world.dies("n1")
    assert kept_states(world.view, world.now_ns + 3 * 10**9) == {CHECKPOINT: "missing"}
