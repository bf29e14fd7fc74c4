"""The cluster that is kept up to date in place is the one that would be made anew."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.controller.planner.estimates import NodeMeasures
from fleetstart.controller.planner.node_state import node_state
from fleetstart.controller.scheduler.live_cluster import NODES_AT_ONCE, LiveCluster
from fleetstart.controller.scheduler.start_orders import NEW_IDS, orders_of, plan_start, planned_peers, request_of
from fleetstart.controller.state.records import VersionKey, VersionRecord
from fleetstart.controller.state.view import NodeSeen
from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.node.peers import CopyOrder, Grant, Peer
from fleetstart.runtime.contract.node.reports import SegmentReport
from fleetstart.runtime.contract.process.moving_average import MovingAverage
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.weights.stage import LayerLayout
from tests.controller.scheduler.cluster import Cluster
from tests.controller.scheduler.test_autoscaler import spec

MOVES = st.tuples(
    st.sampled_from(
        [
            "report",
            "segment",
            "order",
            "status",
            "drop",
            "version",
            "measure",
            "drain",
            "absent",
            "copy",
            "rates",
            "gone",
        ]
    ),
    st.integers(0, 3),
    st.integers(0, 2),
)


def model(index: int) -> VersionRecord:
    one = spec(
        name=FunctionName(f"m{index}"), weights=CheckpointId(f"{index}" * 64), llm=LLMSettings(kv_memory_bytes=MIB)
    )
    layout = LayerLayout(0, [MIB] * 4, [(layer, layer + 1) for layer in range(4)], [])
    return VersionRecord(
        version=Version(1), digest="", spec=one, segment_bytes=4 * MIB, created_unix_ms=0, layout=layout
    )


def peer(reader: NodeId, holder: NodeId) -> Peer:
    """A holder of the first three layers."""
    grant = Grant(checkpoint=CheckpointId("0" * 64), holder=holder, epoch="e", reader=reader, expires_unix_ms=0)
    return Peer(node=holder, address="", grant=grant, secret="", ranges=((0, 3),))


def play(cluster: Cluster, move: str, node_index: int, index: int) -> None:
    view, node = cluster.view, NodeId(f"n{node_index}")
    seen, record = view.nodes.get(node), model(index)
    worker = WorkerId(f"w{node_index}{index}")
    if move == "version":
        view.versions[VersionKey(record.spec.name, Version(1))] = record
    elif move == "order":
        view.put_order(
            WorkerOrder(
                worker=worker, node=node, epoch="e", version=Version(1), spec=record.spec, ordered_unix_ns=1,
                sources=tuple(peer(node, NodeId(f"n{(node_index + step) % 4}")) for step in range(1, index + 1)),
            )
        )  # fmt: skip
    elif move == "drop":
        view.drop_order(worker)
    elif move == "status" and worker in view.orders:
        view.put_status(
            WorkerStatus(
                worker=worker, node=node, function=record.spec.name, version=Version(1),
                state=("starting", "ready", "failed")[index],
            )
        )  # fmt: skip
    elif move == "measure":
        view.node_measures[node] = NodeMeasures(store_bytes_per_s=MovingAverage(1e6 * (index + 1), 1))
    elif move == "drain":
        view.draining = view.draining ^ {node}
    elif move == "copy" and index:
        checkpoint = CheckpointId(f"{index}" * 64)
        view.copies[node, checkpoint] = CopyOrder(node=node, epoch="e", checkpoint=checkpoint, ordered_unix_ns=1)
    elif move == "copy":
        view.copies.pop((node, CheckpointId("1" * 64)), None)
    elif move == "rates" and seen is not None:
        read = {f"peer:n{(node_index + step) % 4}": 1e6 * step for step in range(1, index + 1)}
        view.nodes[node] = NodeSeen(msgspec.structs.replace(seen.report, bytes_per_s={"store": 9e6, **read}))
    elif move == "gone":
        view.nodes.pop(node, None)
    elif seen is not None and move == "absent":
        seen.absent_since_ns = None if seen.absent_since_ns is not None else 1
        view.node_came_or_went(node)
    elif seen is not None:
        segment = SegmentReport(CheckpointId(f"{index}" * 64), "ready", 4 * MIB, 4 * MIB)
        view.nodes[node] = NodeSeen(
            msgspec.structs.replace(
                seen.report,
                memory_used_bytes=index * MIB,
                segments=[segment] if move == "segment" else [],
                peer_address="10.0.0.1:1" if index else "",
            )
        )


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.lists(MOVES, max_size=25))
def test_what_is_kept_up_to_date_is_what_would_be_made_anew(moves: list[tuple[str, int, int]]) -> None:
    cluster = Cluster(nodes=4)
    live = LiveCluster(cluster.view)
    for move in moves:
        play(cluster, *move)
        live.refreshed(0, 0)
    cluster.clock.advance(60)  # estimates of nodes without starts are made anew once in a while
    now_ns, now_unix_ns = cluster.clock.monotonic_ns(), cluster.clock.unix_ns()
    kept = {state.node: state for state in live.refreshed(now_ns, 0)}
    new = {state.node: state for state in LiveCluster(cluster.view).refreshed(now_ns, 0)}
    assert kept.keys() == new.keys()
    for name, state in kept.items():
        fresh = new[name]
        for field in ("epoch", "free_bytes", "workers", "held", "disk_bytes_per_s", "start_s", "memory_bytes"):
            assert getattr(state, field) == getattr(fresh, field), (name, field)
        assert state.link.bytes_per_s == fresh.link.bytes_per_s
        assert (state.up is None) == (fresh.up is None)
        if state.up is not None and fresh.up is not None:
            assert state.up.bytes_per_s == fresh.up.bytes_per_s
            assert {fetch.worker for fetch in state.up.fetches} >= {fetch.worker for fetch in fresh.up.fetches}
            at_rest = [fetch.worker for fetch in state.up.fetches if fetch.worker not in cluster.view.orders]
            assert not at_rest, "what has ended is fetched by nobody"
        assert {fetch.checkpoint for fetch in state.link.fetches} <= {fetch.checkpoint for fetch in fresh.link.fetches}
    assert now_unix_ns


def test_an_uplink_has_what_other_nodes_are_ordered_to_fetch_from_it() -> None:
    cluster = Cluster(nodes=3)
    for node_index in range(3):
        play(cluster, "segment", node_index, 1)
    play(cluster, "version", 0, 1)
    play(cluster, "report", 0, 1)
    live = LiveCluster(cluster.view)
    assert not any(state.up.fetches for state in live.refreshed(0, 0) if state.up is not None)
    play(cluster, "order", 0, 2)
    play(cluster, "version", 0, 2)
    up = {state.node: state.up for state in live.refreshed(0, 0)}
    pending = {node: [fetch.pending_bytes for fetch in link.fetches] for node, link in up.items() if link is not None}
    assert pending == {"n0": [], "n1": [1.5 * MIB], "n2": [1.5 * MIB]}, "three of four layers, from two nodes"
    cluster.view.drop_order(WorkerId("w02"))
    assert not any(state.up.fetches for state in live.refreshed(0, 0) if state.up is not None)


def test_an_uplink_is_as_fast_as_its_readers_have_measured() -> None:
    cluster = Cluster(nodes=3)
    play(cluster, "report", 0, 1)
    live = LiveCluster(cluster.view)

    def sends() -> float:
        up = {state.node: state.up for state in live.refreshed(0, 0)}[NodeId("n0")]
        assert up is not None
        return up.bytes_per_s

    before = sends()
    play(cluster, "rates", 2, 2)  # n2 has 9 MB/s from the store, and 2 MB/s from n0
    assert sends() == 2e6 != before
    play(cluster, "gone", 2, 0)
    assert sends() == before


def test_memory_that_a_copy_was_promised_is_not_free() -> None:
    cluster = Cluster(nodes=1)
    live = LiveCluster(cluster.view)
    (before,) = live.refreshed(0, 0)
    play(cluster, "copy", 0, 1)
    play(cluster, "version", 0, 1)
    (promised,) = live.refreshed(0, 0)
    assert promised.free_bytes == before.free_bytes - 4 * MIB
    play(cluster, "copy", 0, 0)
    (again,) = live.refreshed(0, 0)
    assert again.free_bytes == before.free_bytes


def test_the_peers_of_a_plan_are_those_of_its_orders() -> None:
    cluster = Cluster(nodes=3)
    record = model(1)
    play(cluster, "version", 0, 1)
    play(cluster, "segment", 1, 1)
    request = request_of(cluster.view, VersionKey(record.spec.name, Version(1)), record, 1)
    full = LiveCluster(cluster.view).refreshed(0, 0)
    full.put(dataclasses.replace(full[NodeId("n1")], free_bytes=0))
    plan = plan_start(request, full, 0.0)
    orders = orders_of(plan, record, NEW_IDS, grow=1, now_unix_ns=0)
    assert planned_peers(orders, {order.worker: plan for order in orders}) == {
        order.worker: [NodeId("n1")] for order in orders
    }
    assert planned_peers(orders, {}) == {}


def test_a_node_that_cannot_be_understood_stops_no_start_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(nodes=2)
    cluster.deploy()
    cluster.load(1)

    def faulty(report, *args, **fields):  # type: ignore[no-untyped-def]
        if report.node == "n0":
            raise ValueError("no such layer")
        return node_state(report, *args, **fields)

    monkeypatch.setattr("fleetstart.controller.scheduler.live_cluster.node_state", faulty)
    assert [order.node for order in cluster.step().orders] == ["n1"]


def test_a_plan_that_was_not_written_takes_no_room() -> None:
    cluster = Cluster(memory_mib=600)
    cluster.deploy()
    cluster.load(1)
    now_ns, now_unix_ns = cluster.clock.monotonic_ns(), cluster.clock.unix_ns()
    first = cluster.reconciler.step(cluster.view, now_ns=now_ns, now_unix_ns=now_unix_ns)
    assert len(first.orders) == 1
    again = cluster.reconciler.step(cluster.view, now_ns=now_ns, now_unix_ns=now_unix_ns)
    assert len(again.orders) == 1, "Redis did not take the first, and there is room for one"


def test_new_estimates_for_all_nodes_are_taken_some_nodes_at_a_time() -> None:
    cluster = Cluster(nodes=5 * NODES_AT_ONCE)
    live = LiveCluster(cluster.view)
    view = cluster.view
    before = {state.node: state for state in live.refreshed(cluster.clock.monotonic_ns(), 0)}
    view.node_measures[NodeId("n0")] = NodeMeasures(store_bytes_per_s=MovingAverage(7e6, 1))
    cluster.clock.advance(60)
    turns: list[int] = []
    while len(turns) < 10:
        after = {state.node: state for state in live.refreshed(cluster.clock.monotonic_ns(), 0)}
        turns.append(sum(after[node] is not before[node] for node in before))
        before = after
    assert turns[0] <= NODES_AT_ONCE + 1
    assert max(turns) <= NODES_AT_ONCE + 1
    assert sum(turns) - 5 * NODES_AT_ONCE in (0, 1), "each once, and the node whose own estimate is new perhaps twice"
    assert {state.link.bytes_per_s for state in before.values()} == {7e6}
