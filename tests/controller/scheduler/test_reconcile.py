"""Simulated minutes of a cluster: the view and `now` in, orders out; no Redis, no processes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fleetstart.controller.gateway.dispatch.version_backend import VersionBackend
from fleetstart.controller.planner.cluster import Cluster as PlannedCluster
from fleetstart.controller.planner.plan import Plan, PlanRequest
from fleetstart.controller.scheduler.reconcile import Reconciler
from fleetstart.controller.scheduler.start_orders import plan_start
from fleetstart.controller.scheduler.worker_pool import broken
from fleetstart.controller.state.records import FunctionRecord, VersionKey, VersionRecord
from fleetstart.controller.state.view import NodeSeen
from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.function.spec import LLMSettings, Scale
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, Version
from fleetstart.runtime.contract.node.orders import WorkerStatus
from fleetstart.runtime.contract.node.reports import FunctionLoad, GatewayReport, NodeReport
from fleetstart.runtime.contract.sizes import MIB
from tests.controller.scheduler.cluster import Cluster, F, pipelined
from tests.controller.scheduler.test_autoscaler import spec


def test_demand_orders_workers_once_and_idleness_sends_them_away() -> None:
    cluster = Cluster()
    cluster.deploy(scale=Scale(max=3, keep_alive_s=60))
    assert not cluster.step().orders
    cluster.load(5)
    assert len(cluster.step().orders) == 3
    assert not cluster.step().orders, "what is ordered is not ordered again"
    cluster.obey()
    cluster.load(0)
    for _ in range(59):
        cluster.clock.advance(1)
        assert not cluster.step().orders
    cluster.clock.advance(61)
    assert {order.wanted for order in cluster.step().orders} == {"drain"}
    cluster.obey()
    cluster.step()
    assert not cluster.view.orders


LLM: dict[str, Any] = {"llm": LLMSettings(), "weights": CheckpointId("c" * 64)}


def test_an_idle_worker_stands_by_is_woken_before_one_is_started_and_ends_in_the_end() -> None:
    cluster = Cluster()
    cluster.deploy(scale=Scale(max=3, keep_alive_s=10, standby_s=60), **LLM)
    cluster.load(2)
    cluster.step()
    cluster.obey()
    cluster.load(0)
    cluster.step()
    cluster.clock.advance(11)
    step = cluster.step()
    assert cluster.wanted() == {"standby": 2}
    assert step.rests[VersionKey(F, Version(1))][0] == "moving"
    cluster.obey()
    step = cluster.step()
    assert not step.orders
    rest, again_ns = step.rests[VersionKey(F, Version(1))]
    assert (rest, again_ns) == ("steady", cluster.clock.monotonic_ns() + 60 * 10**9)
    cluster.clock.advance(30)
    cluster.load(1)
    (woken,) = cluster.step().orders
    assert (woken.wanted, cluster.wanted()) == ("run", {"standby": 1, "run": 1})
    assert not cluster.step().orders, "one that is woken is not ordered again"
    cluster.obey()
    cluster.load(3)
    assert {order.wanted for order in cluster.step().orders} == {"run"}
    assert cluster.wanted() == {"run": 3}
    cluster.obey()
    cluster.load(0)
    cluster.step()
    cluster.clock.advance(11)
    cluster.step()
    cluster.obey()
    assert cluster.wanted() == {"standby": 3}
    cluster.clock.advance(61)
    cluster.step()
    assert cluster.wanted() == {"drain": 3}


def test_a_standby_leaves_a_node_that_drains() -> None:
    cluster = Cluster()
    cluster.deploy(scale=Scale(keep_alive_s=1, standby_s=600), **LLM)
    cluster.load(1)
    cluster.step()
    cluster.obey()
    cluster.load(0)
    cluster.step()
    cluster.clock.advance(2)
    cluster.step()
    cluster.obey()
    assert cluster.wanted() == {"standby": 1}
    cluster.view.draining = frozenset(cluster.view.nodes)
    cluster.step()
    assert cluster.wanted() == {"drain": 1}


def test_standby_gives_way_to_a_start_that_finds_no_room() -> None:
    cluster = Cluster(memory_mib=900)
    cluster.deploy(scale=Scale(keep_alive_s=1, standby_s=600), memory_bytes=512 * MIB, **LLM)
    cluster.load(1)
    cluster.step()
    cluster.obey()
    cluster.load(0)
    cluster.step()
    cluster.clock.advance(2)
    cluster.step()
    cluster.obey()
    other = FunctionName("g")
    key = VersionKey(other, Version(1))
    cluster.view.functions[other] = FunctionRecord(name=other, live=Version(1), deployed_unix_ms=0)
    large = spec(name=other, memory_bytes=4096 * MIB)
    cluster.view.versions[key] = VersionRecord(
        version=Version(1), digest="", spec=large, segment_bytes=0, created_unix_ms=0
    )
    load = FunctionLoad(1, 0, oldest_unix_ms=1)
    cluster.view.put_gateway(GatewayReport(gateway="g", loads={str(key): load}), cluster.clock.monotonic_ns())
    step = cluster.step()
    assert key in step.unplaced
    assert cluster.wanted() == {"drain": 1}


@pytest.mark.parametrize("served", [True, False])
def test_a_worker_that_has_served_while_no_scheduler_looked_is_no_failed_start(served: bool) -> None:
    cluster = Cluster()
    cluster.deploy(scale=Scale(min=3, max=3))
    cluster.step()
    error = ErrorInfo(code="worker_lost", message="killed by signal 9")
    for order in list(cluster.view.orders.values()):
        cluster.view.put_status(
            WorkerStatus(
                worker=order.worker, node=order.node, function=F, version=order.version, state="failed", error=error,
                served=served,
            )
        )  # fmt: skip
    cluster.step()
    failure = cluster.view.failures.get(VersionKey(F, Version(1)))
    assert (failure is None) == served
    assert len(cluster.workers()) == (3 if served else 0)


def test_a_step_says_when_the_keep_alive_ends_and_an_old_version_has_none() -> None:
    cluster = Cluster()
    cluster.deploy(scale=Scale(keep_alive_s=60))
    cluster.load(1)
    assert cluster.step().again_unix_ms is None
    cluster.obey()
    cluster.load(0)
    again_unix_ms = cluster.step().again_unix_ms
    assert again_unix_ms is not None
    assert 0 <= again_unix_ms - (cluster.clock.unix_ns() // 1_000_000 + 60_000) <= 1
    cluster.clock.advance(60.001)
    step = cluster.step()
    assert [order.wanted for order in step.orders] == ["drain"]
    assert step.again_unix_ms is None

    cluster.load(1)
    cluster.step()
    cluster.load(0)
    assert cluster.step().again_unix_ms is not None
    cluster.deploy(version=2, env={"A": "1"})
    assert cluster.step().again_unix_ms is None


def test_workers_are_spread_and_memory_is_not_promised_twice() -> None:
    cluster = Cluster(nodes=2, memory_mib=1100)
    cluster.deploy(scale=Scale(max=8))
    cluster.load(8)
    step = cluster.step()
    assert sorted(order.node for order in step.orders) == ["n0", "n0", "n1", "n1"]
    assert step.unplaced


def test_a_new_version_takes_over_and_the_old_one_is_drained_when_its_calls_have_ended() -> None:
    cluster = Cluster()
    cluster.deploy()
    cluster.load(0, running=1)
    cluster.step()
    cluster.obey()
    cluster.deploy(version=2, env={"A": "1"})
    assert not cluster.step().orders, "the old version has a call"
    cluster.load(0)
    assert [(order.version, order.wanted) for order in cluster.step().orders] == [(1, "drain")]


def test_a_dead_nodes_workers_are_replaced_elsewhere() -> None:
    cluster = Cluster(nodes=2)
    cluster.deploy()
    cluster.load(1)
    first = cluster.step().orders[0]
    cluster.obey()
    cluster.view.nodes[first.node].absent_since_ns = cluster.clock.monotonic_ns()
    cluster.clock.advance(1)
    assert not cluster.step().orders, "one missed renewal is no death"
    cluster.clock.advance(1.5)
    assert not cluster.step(read=False).orders, "it may have come back since the last read"
    step = cluster.step()
    assert [order.worker for order in step.deleted_orders] == [first.worker]
    assert step.orders[0].node != first.node


def test_a_draining_nodes_workers_are_replaced_elsewhere_and_none_is_started_there() -> None:
    cluster = Cluster(nodes=2)
    cluster.deploy()
    cluster.load(0, running=1)
    first = cluster.step().orders[0]
    cluster.obey()
    cluster.view.draining = frozenset({first.node})
    drained, started = cluster.step().orders
    assert (drained.worker, drained.wanted) == (first.worker, "drain")
    assert started.wanted == "run"
    assert started.node != first.node
    cluster.obey()
    cluster.view.draining = frozenset(cluster.view.nodes)
    (drained,) = cluster.step().orders
    assert drained.wanted == "drain"
    assert cluster.step().unplaced


def test_a_restarted_daemon_gets_new_orders() -> None:
    cluster = Cluster()
    cluster.deploy()
    cluster.load(1)
    first = cluster.step().orders[0]
    seen = cluster.view.nodes[first.node]
    seen.report = NodeReport(
        node=first.node, epoch="e2", address="", memory_bytes=seen.report.memory_bytes, memory_used_bytes=0, cpus=1
    )
    step = cluster.step()
    assert [order.worker for order in step.deleted_orders] == [first.worker]
    assert step.orders[0].epoch == "e2"


def test_a_broken_version_costs_nothing_until_somebody_calls_after_a_minute() -> None:
    cluster = Cluster()
    cluster.deploy(scale=Scale(keep_alive_s=600))
    cluster.load(1)
    starts = 0
    for _ in range(50):
        starts += sum(order.wanted == "run" for order in cluster.step().orders)
        cluster.obey("failed", ErrorInfo(code="start_failed", message="boom"))
        cluster.clock.advance(1)
    assert starts == 3
    cluster.load(0)
    for _ in range(300):
        cluster.clock.advance(1)
        assert not cluster.step().orders, "nobody calls"
    cluster.load(1)
    assert len(cluster.step().orders) == 1
    cluster.clock.advance(1)
    cluster.obey()
    cluster.step()
    assert not cluster.view.failures


def test_a_change_of_scheduler_keeps_warm_workers() -> None:
    cluster = Cluster()
    cluster.deploy(scale=Scale(keep_alive_s=60))
    cluster.load(2)
    cluster.step()
    cluster.obey()
    cluster.load(0)
    cluster.clock.advance(30)
    cluster.reconciler = Reconciler()
    assert not cluster.step().orders
    cluster.clock.advance(59)
    assert not cluster.step().orders
    cluster.clock.advance(2)
    assert len(cluster.step().orders) == 2


def test_a_fault_of_one_version_stops_no_other_and_its_calls_get_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(nodes=2)
    cluster.deploy()
    odd = FunctionName("a-odd")  # its turn comes first
    cluster.view.functions[odd] = FunctionRecord(name=odd, live=Version(1), deployed_unix_ms=0)
    cluster.view.versions[VersionKey(odd, Version(1))] = VersionRecord(
        version=Version(1), digest="", spec=spec(name=odd), segment_bytes=0, created_unix_ms=0
    )
    tried = plan_start

    def faulty(request: PlanRequest, cluster: PlannedCluster, now_s: float) -> Plan:
        if request.function == odd:
            raise ValueError("no such layer")
        return tried(request, cluster, now_s)

    monkeypatch.setattr("fleetstart.controller.scheduler.reconcile.plan_start", faulty)
    loads = {"f@1": FunctionLoad(1, 0), "a-odd@1": FunctionLoad(1, 0)}
    cluster.view.put_gateway(GatewayReport(gateway="g", loads=loads), cluster.clock.monotonic_ns())
    step = cluster.step()
    assert [order.spec.name for order in step.orders] == ["f"]
    assert list(step.faults) == [(odd, 1)]
    failure = cluster.view.failures[VersionKey(odd, Version(1))]
    assert "ValueError: no such layer" in failure.error.message
    assert broken(failure, cluster.clock.unix_ns() // 1_000_000), "its calls do not wait for nothing"
    assert not cluster.step().failures, "it is written once"
    cluster.clock.advance(61)
    assert cluster.step().failures, "and again after a while"
    monkeypatch.setattr("fleetstart.controller.scheduler.reconcile.plan_start", tried)
    cluster.clock.advance(61)
    assert [order.spec.name for order in cluster.step().orders] == ["a-odd"]


def test_a_cache_larger_than_the_memory_is_no_negative_memory() -> None:
    """A version from before the check at deploy, on nodes with and without a GPU."""
    cluster = Cluster(nodes=4)
    pipelined(cluster)
    key = VersionKey(F, Version(1))
    record = cluster.view.versions[key]
    large = msgspec.structs.replace(record.spec, llm=LLMSettings(kv_memory_bytes=4096 * MIB))
    cluster.view.versions[key] = msgspec.structs.replace(record, spec=large)
    cluster.load(1)
    step = cluster.step()
    assert not step.orders
    assert "it needs a GPU, which none of 4 nodes has" in step.unplaced[key].message
    for name, seen in cluster.view.nodes.items():
        cluster.view.nodes[name] = NodeSeen(msgspec.structs.replace(seen.report, gpus=1))
    step = cluster.step()
    assert len(step.orders) == 4
    assert not step.faults
    assert {order.spec.memory_bytes for order in step.orders} == {64 * MIB}, "its cache is in device memory"


def test_calls_that_another_gateway_had_long_ago_are_not_expected_again() -> None:
    """Gateway a is busy; b had 5,000 calls, was idle, and gets one."""
    cluster = Cluster(nodes=4)
    deployed = cluster.deploy(scale=Scale(max=20, keep_alive_s=60))
    record = cluster.view.versions[VersionKey(F, Version(1))]
    a, b = (
        VersionBackend(VersionKey(F, Version(1)), record, elsewhere=lambda _: 0, later=lambda *_: None)
        for _ in range(2)
    )
    for _ in range(5000):
        b.recent.add(cluster.clock.monotonic_ns())
    cluster.clock.advance(60)

    def report(name: str, backend: VersionBackend, running: int) -> None:
        load = msgspec.structs.replace(backend.load(cluster.clock.monotonic_ns()), running=running, call_s=1.0)
        cluster.view.put_gateway(GatewayReport(gateway=name, loads={"f@1": load}), cluster.clock.monotonic_ns())

    a.recent.add(cluster.clock.monotonic_ns())
    report("a", a, 1)
    assert len(cluster.step().orders) == 1
    cluster.clock.advance(1)
    b.recent.add(cluster.clock.monotonic_ns())
    report("a", a, 1)
    report("b", b, 1)
    assert len(cluster.step().orders) == 1, "two calls run: two workers"
    assert deployed.concurrency == 1
