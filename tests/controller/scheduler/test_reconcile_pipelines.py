"""Simulated minutes of a cluster that starts pipelines, and bursts of calls that start several workers."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.scheduler.step import Step
from fleetstart.controller.state.view import NodeSeen
from fleetstart.runtime.contract.function.spec import SLO, Scale
from fleetstart.runtime.contract.ids import CheckpointId, NodeId
from fleetstart.runtime.contract.node.orders import WorkerStatus
from fleetstart.runtime.contract.node.peers import Grant, Peer
from fleetstart.runtime.contract.sizes import MIB
from tests.controller.planner.worlds import request
from tests.controller.scheduler.cluster import Cluster, F, pipelined, stages_of
from tests.controller.scheduler.test_autoscaler import spec


def test_a_pipeline_leaves_with_any_of_its_stages() -> None:
    cluster = Cluster(nodes=2)
    pipelined(cluster)
    cluster.load(1)
    first, second = sorted(cluster.step().orders, key=lambda order: order.stage.index if order.stage else 0)
    assert first.node != second.node
    cluster.view.draining = frozenset({second.node})
    changed = {order.worker: order.wanted for order in cluster.step().orders}
    assert changed[first.worker] == "drain"
    assert changed.get(second.worker, "run") == "run", "its calls may still need it"


def test_a_cold_start_is_a_pipeline_that_becomes_one_worker() -> None:
    cluster = Cluster(nodes=4)
    pipelined(cluster)
    cluster.load(1)
    step = cluster.step()
    assert stages_of(cluster) == [(0, "run", True), (1, "run", False), (2, "run", False), (3, "run", False)]
    assert len({order.node for order in step.orders}) == 4
    assert len({order.secret for order in step.orders}) == 1
    assert step.plans.keys() == {order.worker for order in step.orders}
    assert {plan.decided_unix_ms for plan in step.plans.values()} == {cluster.clock.unix_ns() // 1_000_000}
    cluster.clock.advance(1)
    assert not cluster.step().orders, "a pipeline is one worker"


def test_orders_that_are_written_again_keep_the_time_of_their_decision_and_their_deadline() -> None:
    cluster = Cluster(nodes=4)
    pipelined(cluster, slo=SLO(ttft_s=3.0))
    cluster.load(1)
    decided_unix_ns = cluster.clock.unix_ns()
    before = {order.worker: order for order in cluster.step().orders}
    assert all(order.fetch_by_unix_ns > decided_unix_ns for order in before.values())
    cluster.clock.advance(0.3)
    for order in before.values():
        cluster.view.put_status(
            WorkerStatus(
                worker=order.worker, node=order.node, function=F, version=order.version, state="starting",
                link=f"{order.node}:1", whole=False, changed_unix_ns=cluster.clock.unix_ns(),
            )
        )  # fmt: skip
    again = cluster.step().orders
    assert {order.worker for order in again} == before.keys()
    for order in again:
        assert order.ordered_unix_ns == cluster.clock.unix_ns()
        assert order.decided_unix_ns == decided_unix_ns
        assert order.fetch_by_unix_ns == before[order.worker].fetch_by_unix_ns


def test_more_demand_makes_workers_of_the_helpers_before_it_starts_others() -> None:
    cluster = Cluster(nodes=4)
    pipelined(cluster, concurrency=1, scale=Scale(max=6))
    cluster.load(1)
    cluster.step()
    cluster.load(3)
    cluster.clock.advance(1)
    step = cluster.step()
    assert stages_of(cluster) == [(0, "run", True), (1, "run", True), (2, "run", True), (3, "run", False)]
    assert not step.plans
    cluster.clock.advance(1)
    assert not cluster.step().orders


def test_a_surge_is_one_pipeline_of_as_many_workers() -> None:
    cluster = Cluster(nodes=4)
    pipelined(cluster, concurrency=1, scale=Scale(max=8))
    cluster.load(3)
    step = cluster.step()
    assert len({order.stage.pipeline for order in step.orders if order.stage is not None}) == 1
    assert sum(order.grow for order in step.orders) == 3


def test_the_workers_of_a_burst_are_ordered_in_one_decision_once_its_calls_are_there() -> None:
    cluster = Cluster(nodes=8)
    pipelined(cluster, concurrency=16, scale=Scale(max=8))
    cluster.load(1)
    first = cluster.step()
    assert first.plans, "the first worker does not wait for others' calls"
    cluster.obey()
    helped = 16 * len(first.orders)
    for calls in range(helped, helped + 33, 3):
        cluster.clock.advance(0.005)
        cluster.load(calls)
        step = cluster.step()
        assert not step.plans, "more calls come: the burst is not seen whole"
    assert step.again_unix_ms is not None
    missing = -(-calls // 16) - len(first.orders)
    assert missing == 2
    cluster.clock.advance(0.2)
    ordered = cluster.step().orders
    assert sum(order.grow or order.stage is None for order in ordered) == missing
    cluster.clock.advance(1)
    assert not cluster.step().plans, "all that was missing was ordered at once"


def test_a_burst_is_gathered_for_as_long_as_suits_the_links_that_were_measured() -> None:
    """Nodes that have measured nothing yet counted as having a link of a gigabit."""
    cluster = Cluster(nodes=8)
    seen = cluster.view.nodes[NodeId("n3")]
    slow = msgspec.structs.replace(seen.report, measured={"store": 5e6})
    cluster.view.nodes[NodeId("n3")] = NodeSeen(slow)
    pipelined(cluster, concurrency=1, scale=Scale(max=8))
    cluster.load(1)
    cluster.step()
    cluster.obey()
    helped = len(cluster.view.orders)
    cluster.load(helped + 1)
    for after_s, ordered in ((0.0, False), (0.5, False), (0.5, True)):
        cluster.clock.advance(after_s)
        assert bool(cluster.step().plans) is ordered


def test_a_function_that_may_have_no_more_workers_does_not_wait_for_more_calls() -> None:
    cluster = Cluster(nodes=8)
    pipelined(cluster, concurrency=1, scale=Scale(max=8))
    cluster.load(1)
    cluster.step()
    cluster.obey()
    cluster.load(50)
    assert cluster.step().plans


def reasons(step: Step) -> list[str]:
    return [one.why_not for plan in step.plans.values() for one in plan.considered]


def test_what_a_call_has_waited_counts_as_long_as_its_promise_can_be_kept() -> None:
    for waited_s, meets_slo, counted in ((0.0, True, False), (0.5, True, True), (5.0, True, False)):
        cluster = Cluster(nodes=4)
        pipelined(cluster, slo=SLO(ttft_s=3.0))
        cluster.load(1, waited_s=waited_s)
        step = cluster.step()
        assert {plan.meets_slo for plan in step.plans.values()} == {meets_slo}, "the next call's promise can be kept"
        assert any("s of waiting" in why for why in reasons(step)) is counted, waited_s


def test_those_who_wait_for_a_start_under_way_are_not_counted_again() -> None:
    cluster = Cluster(nodes=8)
    pipelined(cluster, concurrency=1, slo=SLO(ttft_s=3.0), scale=Scale(max=8))
    cluster.load(1)
    cluster.step()
    cluster.load(8, waited_s=0.5)
    step = cluster.step()
    assert step.plans
    assert not any("s of waiting" in why for why in reasons(step))


def test_a_pipeline_that_is_sent_away_stays_one_until_its_first_stage_has_ended() -> None:
    """Its calls may go on, and they need all stages."""
    cluster = Cluster(nodes=4)
    pipelined(cluster, scale=Scale(keep_alive_s=1))
    cluster.load(1)
    cluster.step()
    cluster.load(0)
    cluster.step()
    cluster.clock.advance(5)
    cluster.step()
    assert [wanted for _, wanted, _ in stages_of(cluster)] == ["drain", "run", "run", "run"]
    (first,) = [order for order in cluster.view.orders.values() if order.wanted == "drain"]
    assert first.secret
    assert len(first.peers) == 4


@given(st.integers(1, 4096), st.integers(16, 4096), st.integers(1, 8), st.booleans())
def test_no_stage_has_less_memory_than_a_worker_may_have(
    kv_mib: int, memory_mib: int, stages: int, kv_on_device: bool
) -> None:
    asked = request(layers=8, memory_bytes=memory_mib * MIB, kv_bytes=kv_mib * MIB)
    for cut in asked.layout.cuts(stages):
        own_bytes = asked.own_bytes(cut, full=False, kv_on_device=kv_on_device)
        assert 16 * MIB <= own_bytes <= memory_mib * MIB
        spec(memory_bytes=own_bytes)


def test_other_sources_give_a_start_no_more_time() -> None:
    """Grants are renewed every few minutes, and peers come and go: the order changes, and what it asks for does not."""
    cluster = Cluster()
    cluster.deploy(scale=Scale(min=1, max=1), start_timeout_s=60)
    [order] = cluster.step().orders
    grant = Grant(checkpoint=CheckpointId("c"), holder=NodeId("n1"), epoch="e", reader=NodeId("n0"), expires_unix_ms=1)
    for seconds in range(0, 65, 5):
        assert cluster.workers() == [order.worker], f"it is given up after {seconds} s"
        cluster.clock.advance(5)
        peer = Peer(node=NodeId("n1"), address="n1:1", grant=grant, secret=str(seconds))
        order = order.changed(cluster.clock.unix_ns(), sources=(peer,))
        cluster.view.put_order(order)
        cluster.step()
    cluster.clock.advance(1)
    cluster.step()
    assert order.worker not in cluster.workers()
