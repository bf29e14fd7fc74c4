"""What starts, first answers and calls teach, as they stand in statuses, plans and reports."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fleetstart.controller.planner.estimates import NodeMeasures, VersionMeasures
from fleetstart.controller.planner.plan import Plan, StagePlan
from fleetstart.controller.scheduler.calibration.observations import (
    NOT_YET,
    SpeedTracker,
    StartSample,
    learn_outcome,
    learn_speed,
    learn_start,
    outdated,
    ready_s,
    sharers,
)
from fleetstart.controller.scheduler.start_orders import stage_of
from fleetstart.controller.state.records import FunctionRecord, StartOutcome, VersionKey, read_measures
from fleetstart.controller.state.view import NodeSeen, View
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, NodeId, PipelineId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.node.reports import FunctionLoad, GatewayReport, NodeReport
from fleetstart.runtime.contract.node.speed import Speed
from fleetstart.runtime.contract.process.moving_average import MovingAverage
from fleetstart.runtime.contract.timeline import Timeline
from fleetstart.runtime.contract.weights.stage import Stage
from tests.controller.scheduler.test_autoscaler import spec

MB = 1_000_000
MS = 1_000_000
F, N, W = FunctionName("f"), NodeId("n"), WorkerId("w")
KEY = VersionKey(F, Version(1))
NEW = (NodeMeasures(), VersionMeasures())


def order(worker: str = "w", *, index: int | None = None, weights: str = "c", node: NodeId = N) -> WorkerOrder:
    cuts = ((0, 2), (2, 4))
    return WorkerOrder(
        worker=WorkerId(worker),
        node=node,
        epoch="e",
        version=KEY.version,
        spec=spec(weights=CheckpointId(weights * 64)),
        ordered_unix_ns=1,
        stage=Stage(pipeline=PipelineId("p"), index=index, cuts=cuts) if index is not None else None,
    )


def status(start: Any = "cold", state: Any = "ready", worker: str = "w") -> WorkerStatus:
    """20 ms to start, 100 ms of device, 30 ms of imports, 1 s to fetch."""
    timeline = Timeline(origin_unix_ns=0)
    timeline.add("start", 0, 20 * MS)
    timeline.add("device", 20 * MS, 120 * MS)
    timeline.add("import", 20 * MS, 50 * MS)
    timeline.add("load", 50 * MS, 1010 * MS)
    if start == "cold":
        timeline.add("fetch", 0, 1000 * MS)
    return WorkerStatus(
        worker=WorkerId(worker), node=N, function=F, version=KEY.version, state=state, start=start, timeline=timeline
    )


def stage(missing_bytes: int = 100 * MB, store_bytes: int | None = None) -> StagePlan:
    return StagePlan(
        node=N,
        epoch="e",
        first=0,
        end=4,
        full=True,
        memory_bytes=1,
        reserved_bytes=1,
        missing_bytes=missing_bytes,
        store_bytes=missing_bytes if store_bytes is None else store_bytes,
        fetch_s=1.0,
    )


def plan(*stages: StagePlan, ttft_s: float = 2.0, ready_s: float = 0.6, decided_unix_ms: int = 10_000) -> Plan:
    return Plan(stages=list(stages), ttft_s=ttft_s, ready_s=ready_s, reason="", decided_unix_ms=decided_unix_ms)


def report(node: NodeId = N, epoch: str = "e", rate: float = 0.0, **speeds: Speed) -> NodeReport:
    return NodeReport(
        node=node,
        epoch=epoch,
        address="",
        memory_bytes=1,
        memory_used_bytes=0,
        cpus=1,
        bytes_per_s={"store": rate} if rate else {},
        speeds={f"{name}@1": speed for name, speed in speeds.items()},
    )


def speed(calls: int, **fields: Any) -> Speed:
    return Speed(calls=calls, call_s=1.0, **{"prefill_s": 0.1, "decode_s": 0.05, **fields})


def test_a_cold_start_teaches_the_nodes_link_and_its_own_steps() -> None:
    node, version = learn_start(NEW, status(), order(), stage(), None, 1)
    assert (node.start_s, node.device_s) == (MovingAverage(0.02, 1), MovingAverage(0.1, 1))
    assert node.store_bytes_per_s == MovingAverage(100.0 * MB, 1)
    assert version.library_s.count == 0, "its load waited for weights"


def test_a_nodes_own_measurement_counts_before_the_timelines_unless_the_link_was_shared() -> None:
    said = report(rate=120.0 * MB)
    node, _ = learn_start(NEW, status(), order(), stage(), said, 1)
    assert node.store_bytes_per_s.value == pytest.approx(120 * MB)
    node, _ = learn_start(NEW, status(), order(), stage(), said, 2)
    assert node.store_bytes_per_s.value == pytest.approx(200 * MB)


def test_bytes_of_two_sources_tell_of_neither_and_those_of_the_disk_of_the_disk() -> None:
    node, _ = learn_start(NEW, status(), order(), stage(100 * MB, 40 * MB), None, 1)
    assert (node.store_bytes_per_s.count, node.disk_bytes_per_s.count) == (0, 0)
    node, _ = learn_start(NEW, status(), order(), stage(100 * MB, 0), None, 1)
    assert (node.store_bytes_per_s.count, node.disk_bytes_per_s) == (0, MovingAverage(100.0 * MB, 1))


def test_a_warm_start_teaches_what_building_takes_but_not_a_stages_that_waits_for_others() -> None:
    _, version = learn_start(NEW, status("warm"), order(), stage(0), None, 1)
    assert version.library_s.value == pytest.approx(0.99)
    _, version = learn_start(NEW, status("warm"), order(index=1), stage(0), None, 1)
    assert version.library_s.count == 0


def test_the_plan_of_a_worker_is_that_of_its_stage() -> None:
    both = plan(stage(1), stage(2))
    assert [stage_of(both, order(index=index)) for index in (0, 1)] == both.stages
    assert stage_of(plan(stage(1)), order(index=1)) is None
    assert stage_of(plan(stage(1)), order()) == stage(1)


def test_who_else_fetches_shares_the_link() -> None:
    view = View()
    for one in (order(), order("w2"), order("w3", weights="d"), order("w4", weights="e"), order("w5", weights="f"),
                order("w6", weights="a", node=NodeId("m"))):  # fmt: skip
        view.orders[one.worker] = one
    view.put_status(status(state="ready", worker="w4"))
    view.put_status(status("warm", "starting", "w5"))
    assert sharers(view, order()) == 2, "w3: w2 is of the same checkpoint, w4 and w5 have theirs, w6 is elsewhere"


def test_an_outcome_is_compared_from_the_decision_on() -> None:
    answered = StartOutcome(worker=W, function=F, version=KEY.version, first_byte_unix_ms=12_500)
    known = learn_outcome(VersionMeasures(), plan(stage()), answered, StartSample(1.0, False), order())
    assert (known.ttft_error.value, known.ttft_error.count) == pytest.approx((0.2, 1))
    assert known.ttft_ratios == {"alone": [1.25]}
    assert known.rest_s.value == pytest.approx(0.11), "its parts took 0.4 s more than planned, the rest 0.1 s"
    unknown = learn_outcome(VersionMeasures(), plan(stage()), answered, None, order())
    assert (unknown.rest_s.count, unknown.ttft_error) == (0, known.ttft_error)
    for useless in (plan(stage(), decided_unix_ms=0), plan(stage(), decided_unix_ms=12_500), plan()):
        assert learn_outcome(known, useless, answered, StartSample(1.0, False), order()) is known


@pytest.mark.parametrize("off_s", [-5_000, 5_000])
def test_an_outcome_by_clocks_that_differ_is_ignored(off_s: int) -> None:
    answered = StartOutcome(worker=W, function=F, version=KEY.version, first_byte_unix_ms=12_500 + off_s * 1000)
    for readied in (StartSample(1.0, False), None):
        assert learn_outcome(VersionMeasures(), plan(stage()), answered, readied, order()) == VersionMeasures()


def test_the_slowest_stage_and_any_shared_link_count_for_a_start() -> None:
    readied = NOT_YET.with_stage(1.0, 1).with_stage(0.5, 2)
    assert readied == (1.0, True)
    assert NOT_YET.with_stage(1.0, 1) == (1.0, False)
    answered = StartOutcome(worker=W, function=F, version=KEY.version, first_byte_unix_ms=12_500)
    known = learn_outcome(VersionMeasures(), plan(stage(), stage()), answered, readied, order())
    assert known.ttft_ratios == {"group": [pytest.approx(1.05)]}, "0.4 s were the others'"
    warm = msgspec.structs.replace(stage(0), fetch_s=0.0)
    assert learn_outcome(VersionMeasures(), plan(warm), answered, None, order()).ttft_ratios == {"warm": [1.25]}


def test_what_a_start_took_by_the_planners_formula() -> None:
    version = VersionMeasures(library_s=MovingAverage(0.3, 1))
    assert ready_s(status(), version) == pytest.approx(1.0), "the fetch hid the rest"
    assert ready_s(status("warm"), version) == pytest.approx(0.42)


def test_a_pipelines_calls_teach_the_hop_and_a_whole_workers_the_model() -> None:
    known = learn_speed(VersionMeasures(), speed(1))
    assert (known.prefill_s.value, known.decode_s.value, known.call_s.value) == (0.1, 0.05, 1.0)
    known = learn_speed(known, speed(2, stages=4, decode_s=0.07, prefill_s=9.0))
    assert known.hop_s.value == pytest.approx(0.005)
    assert (known.prefill_s.value, known.decode_s.value) == (0.1, 0.05)


def test_each_call_is_learned_from_once_over_reports_and_over_schedulers() -> None:
    seen = SpeedTracker([report(f=speed(3))])
    assert seen.news([report(f=speed(3))]) == []
    assert seen.news([report(f=speed(4)), report(NodeId("m"), f=speed(1))]) == [(KEY, speed(4)), (KEY, speed(1))]
    assert seen.news([report(f=speed(4)), report(NodeId("m"), f=speed(1))]) == []
    assert seen.news([report(epoch="later", f=speed(1))]) == [(KEY, speed(1))], "its daemon began anew"
    assert SpeedTracker([report(epoch="later", f=speed(1))]).news([report(epoch="later", f=speed(1))]) == []


def test_measures_survive_redis_and_what_is_not_understood_is_learned_anew() -> None:
    node, version = NodeMeasures(start_s=MovingAverage(1, 2)), VersionMeasures(call_s=MovingAverage(3, 4))
    raw = {
        keys.measures_of_node(N).encode(): msgspec.json.encode(node),
        keys.measures_of_version(*KEY).encode(): msgspec.json.encode(version),
        b"node:x": b"{",
        b"version:f": b"{}",
        b"\xff": b"{}",
    }
    assert read_measures(raw) == ({N: node}, {KEY: version})


def test_measures_go_with_nodes_and_with_versions_that_nobody_needs() -> None:
    view = View()
    view.nodes[N] = NodeSeen(report())
    view.node_measures = {N: NodeMeasures(), NodeId("removed"): NodeMeasures()}
    versions = [VersionKey(FunctionName(name), Version(2)) for name in ("live", "called", "deleted")]
    view.version_measures = {key: VersionMeasures() for key in (*versions, KEY)}
    view.functions[FunctionName("live")] = FunctionRecord(
        name=FunctionName("live"), live=Version(2), deployed_unix_ms=0
    )
    view.put_gateway(GatewayReport(gateway="g", loads={"called@2": FunctionLoad(0, 1)}), 0)
    view.orders[W] = order()
    assert outdated(view) == ["node:removed", "version:deleted@2"]
