"""Planning of cold starts: converts the view to the planner's cluster, and its plan to orders."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import CheckpointId, NodeId, PipelineId, WorkerId, new_pipeline_id, new_worker_id
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.weights.stage import Stage

from ..planner.checkpoint_layout import CheckpointLayout, checkpoint_layout
from ..planner.cluster import Cluster
from ..planner.constraints import constraints_of
from ..planner.error_margins import margins_of
from ..planner.estimates import (
    FleetMeasures,
    VersionMeasures,
    version_prior,
    with_fleet_measures,
)
from ..planner.multicast.starts import plan_starts
from ..planner.plan import FileTree, Plan, PlanRequest, StagePlan
from ..state.records import VersionKey, VersionRecord
from ..state.view import View
from .volume_mounts import volume_trees


@dataclass(frozen=True, slots=True, kw_only=True)
class IdSource:
    """Generators of ids and pipeline secrets, random so that they cannot be guessed."""

    worker: Callable[[], WorkerId]
    pipeline: Callable[[], PipelineId]
    secret: Callable[[], str]


NO_OTHERS = FleetMeasures()
NO_WEIGHTS = checkpoint_layout(None, 0)
NEW_IDS = IdSource(worker=new_worker_id, pipeline=new_pipeline_id, secret=lambda: secrets.token_urlsafe(24))


def measures_of(view: View, key: VersionKey, record: VersionRecord) -> VersionMeasures:
    return view.version_measures.get(key) or prior_of(view, record)


def prior_of(view: View, record: VersionRecord) -> VersionMeasures:
    """A version's estimates before its first start, from the memory that nodes have measured; that of a GPU is not."""
    reports = [seen.report for seen in view.nodes.values()]
    measured = [rate for report in reports if (rate := report.measured.get("memory"))]
    if not measured or any(report.gpus for report in reports):
        return version_prior(record.segment_bytes)
    return version_prior(record.segment_bytes, sorted(measured)[len(measured) // 2])


def request_of(
    view: View,
    key: VersionKey,
    record: VersionRecord,
    workers: int,
    *,
    missing: int = 1,
    others: FleetMeasures = NO_OTHERS,
    waited_s: float = 0.0,
) -> PlanRequest:
    """The planner's request for so many whole workers, of those that are missing. `others`: estimates over all
    versions."""
    spec = record.spec
    measures = with_fleet_measures(measures_of(view, key, record), others)
    return PlanRequest(
        function=key.name,
        layout=checkpoint_layout(record.layout if spec.in_layers else None, record.segment_bytes),
        memory_bytes=spec.memory_bytes,
        checkpoint=spec.weights,
        trees=_trees(view, record),
        kv_bytes=spec.llm.least_kv_bytes if spec.llm is not None else 0,
        measures=measures,
        speeds=others.speeds,
        margins=margins_of(measures.ttft_ratios, others.margins),
        slo=spec.slo,
        workers=workers,
        missing=missing,
        chunks=record.chunks,
        most=spec.scale.max,
        waited_s=waited_s,
        wanted=constraints_of(spec, record.packages_for, measures.device_short_bytes),
        on_device=spec.llm is not None or spec.layered,
    )


def _trees(view: View, record: VersionRecord) -> tuple[FileTree, ...]:
    """The packages and volumes that a worker of this version would get now."""
    packages = [] if record.spec.layer is None else [FileTree(record.spec.layer, record.packages_bytes)]
    return (*packages, *volume_trees(view.access, record.spec))


def plan_start(request: PlanRequest, cluster: Cluster, now_s: float) -> Plan:
    """Plans a start. If it cannot meet the SLO of a call that has waited, it is planned for the calls after it."""
    chosen = plan_starts(request, cluster, now_s)
    if request.waited_s and not chosen.meets_slo and chosen.error is None:
        return plan_starts(dataclasses.replace(request, waited_s=0.0, patient=False), cluster, now_s)
    return chosen


def layout_in(layouts: dict[CheckpointId, CheckpointLayout], record: VersionRecord) -> CheckpointLayout:
    checkpoint = record.spec.weights
    if checkpoint is None:
        return NO_WEIGHTS
    if checkpoint not in layouts:
        layouts[checkpoint] = checkpoint_layout(record.layout, record.segment_bytes)
    return layouts[checkpoint]


def orders_of(plan: Plan, record: VersionRecord, ids: IdSource, *, grow: int, now_unix_ns: int) -> list[WorkerOrder]:
    """The orders of a plan, one a stage; the first `grow` become whole workers once the pipeline serves, and all those
    of a multicast.

    Stages that are planned with less than a whole worker's memory are limited to it (HydraServe section 4.1).
    """
    members = _members(plan, ids)
    return [
        WorkerOrder(
            worker=ids.worker(),
            node=stage.node,
            epoch=stage.epoch,
            version=record.version,
            spec=_with_memory(record.spec, stage.memory_bytes) if index and not stage.full else record.spec,
            ordered_unix_ns=now_unix_ns,
            decided_unix_ns=now_unix_ns,
            fetch_by_unix_ns=_unix_ns(stage.fetch_within_s, now_unix_ns),
            stage=member.stage,
            secret=member.secret,
            peers=("",) * len(member.stage.cuts) if member.stage is not None else (),
            grow=member.stage is not None and index < grow,
            pulls=tuple(stage.pulls),
            devices=stage.devices,
        )
        for index, (stage, member) in enumerate(zip(plan.stages, members, strict=True))
    ]


class _Member(NamedTuple):
    """A worker's part in a pipeline, and the pipeline's secret."""

    stage: Stage | None
    secret: str


def _members(plan: Plan, ids: IdSource) -> list[_Member]:
    """The part that each worker of a plan has in a pipeline: in the one of a group, in one of a multicast's, or in
    none."""
    found = [_Member(None, "")] * len(plan.stages)
    together = [list(range(len(plan.stages)))] if plan.together else plan.pipelines
    for places in together:
        if len(places) < 2:
            continue
        pipeline, secret = ids.pipeline(), ids.secret()
        cuts = tuple((plan.stages[place].first, plan.stages[place].end) for place in places)
        for index, place in enumerate(places):
            found[place] = _Member(Stage(pipeline=pipeline, index=index, cuts=cuts), secret)
    return found


def planned_peers(orders: Iterable[WorkerOrder], plans: Mapping[WorkerId, Plan]) -> dict[WorkerId, list[NodeId]]:
    """The peers that the plans of new workers fetch from, the largest share first; those of a multicast in the order
    that its pulls count by."""
    found: dict[WorkerId, list[NodeId]] = {}
    for order in orders:
        plan = plans.get(order.worker)
        stage = stage_of(plan, order) if plan is not None else None
        if stage is not None and stage.peers:
            shares = stage.peers if stage.pulls else sorted(stage.peers, key=lambda share: -share.size_bytes)
            found[order.worker] = [share.node for share in shares]
    return found


def stage_of(plan: Plan, order: WorkerOrder) -> StagePlan | None:
    """The plan of this worker's stage, or of this worker of a multicast; None if the plan has no such one."""
    if not plan.together:
        return next((stage for stage in plan.stages if stage.node == order.node), None)
    index = order.stage.index if order.stage is not None else 0
    return plan.stages[index] if index < len(plan.stages) else None


def reserve(cluster: Cluster, plan: Plan, orders: list[WorkerOrder], request: PlanRequest, now_ns: int) -> None:
    """Enters orders into the cluster, for the next decision of the same step."""
    for stage, order in zip(plan.stages, orders, strict=True):
        cluster.order(stage, order.worker, request.checkpoint, now_ns / 1e9, request.trees)


def _unix_ns(within_s: float | None, now_unix_ns: int) -> int:
    return now_unix_ns + round(within_s * 1e9) if within_s is not None else 0


def _with_memory(spec: FunctionSpec, memory_bytes: int) -> FunctionSpec:
    return msgspec.structs.replace(spec, memory_bytes=memory_bytes)


UNPLACED_NS = 10_000_000_000
"""Time that calls wait for a node with room, or for a node to come back: a restart takes a second or two."""
