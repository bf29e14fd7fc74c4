"""One node as the planner sees it: room, speed, what it holds, what it fetches; and how that follows from its report.

Nothing is kept that orders and reports do not say, so a new scheduler sees what the old one saw. To build the states
from a `View`: `orders_seen(view.orders.values(), view.statuses, view.versions, ...)`, then `node_state` with the report
of each node that is not absent and what was seen of it. A state is good until the report, an order or a status of that
node changes; time alone is accounted for (`Link.at`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fleetstart.controller.planner.contention import NEVER, Fetching, Link
from fleetstart.controller.planner.measures import NodeMeasures, VersionMeasures, version_prior
from fleetstart.controller.planner.plans import StagePlan
from fleetstart.controller.planner.predict import hops_s, work
from fleetstart.controller.planner.shape import EVERY_LAYER, Cut, Shape, layer_set
from fleetstart.controller.records import VersionKey, VersionRecord
from fleetstart.runtime.contract.function import SLO
from fleetstart.runtime.contract.ids import CheckpointId, NodeId, PipelineId, WorkerId
from fleetstart.runtime.contract.messages import FINAL, NodeReport, SegmentReport, WorkerOrder, WorkerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a node has of one checkpoint, as sets of layers."""

    host: int = 0
    coming: int = 0
    """On its way for a worker that starts there: nobody fetches it twice."""
    disk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    node: NodeId
    epoch: str
    memory_bytes: int
    free_bytes: int
    """Of memory, less what is promised to workers that have been ordered and to what they fetch."""
    workers: int
    """There or ordered; 0 makes its device free."""
    link: Link
    disk_bytes_per_s: float
    device_bytes_per_s: float
    start_s: float
    """t_cc + t_cu."""
    held: Mapping[CheckpointId, Held]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSeen:
    """An order on the node, what is known of its worker, and of its version."""

    order: WorkerOrder
    status: WorkerStatus | None
    shape: Shape
    measures: VersionMeasures
    full: int = 1
    """How many workers of its pipeline have a whole worker's memory."""

    @property
    def layers(self) -> int:
        stage = self.order.stage
        return EVERY_LAYER if stage is None else self.shape.stage(stage.first, stage.end).layers

    @property
    def size_bytes(self) -> int:
        """Of weights that it needs before it is ready."""
        stage = self.order.stage
        return self.shape.total_bytes if stage is None else self.shape.stage(stage.first, stage.end).size_bytes

    @property
    def starting(self) -> bool:
        return self.order.wanted == "run" and (self.status is None or self.status.state == "starting")


def orders_seen(
    orders: Iterable[WorkerOrder],
    statuses: Mapping[WorkerId, WorkerStatus],
    records: Mapping[VersionKey, VersionRecord],
    shapes: Mapping[VersionKey, Shape],
    measures: Mapping[VersionKey, VersionMeasures],
) -> dict[NodeId, list[OrderSeen]]:
    """By node. A version without measures has its prior's; orders of versions that are not known are left out."""
    orders = list(orders)
    full: Counter[PipelineId] = Counter()
    for order in orders:
        record = records.get(_key(order))
        if order.stage is not None and record is not None:
            full[order.stage.pipeline] += order.spec.memory_bytes >= record.spec.memory_bytes
    found: dict[NodeId, list[OrderSeen]] = {}
    for order in orders:
        key = _key(order)
        shape = shapes.get(key)
        if shape is None:
            continue
        seen = OrderSeen(
            order=order,
            status=statuses.get(order.worker),
            shape=shape,
            measures=measures.get(key) or version_prior(shape.total_bytes),
            full=full[order.stage.pipeline] if order.stage is not None else 1,
        )
        found.setdefault(order.node, []).append(seen)
    return found


def _key(order: WorkerOrder) -> VersionKey:
    return VersionKey(order.spec.name, order.version)


def fetch_within_s(slo: SLO | None, measures: VersionMeasures, cuts: Sequence[Cut], full: int) -> float:
    """How long after its order a stage's bytes may take for the promise on TTFT to be kept (D_i of eq. 3)."""
    if slo is None or slo.ttft_s is None:
        return NEVER
    done = work(len(cuts), full, sum(cut.share for cut in cuts[:full]))
    after_s = measures.prefill_s.value * done + hops_s(len(cuts), measures.hop_s.value) + measures.rest_s.value
    return slo.ttft_s - after_s


def node_state(
    report: NodeReport,
    seen: Sequence[OrderSeen],
    measures: NodeMeasures,
    *,
    shapes: Mapping[CheckpointId, Shape],
    now_s: float,
    now_unix_ns: int,
) -> NodeState:
    """`shapes` are of the checkpoints that are deployed; of others it counts nothing. `seen` are of this node."""
    alive = [one for one in seen if one.status is None or one.status.state not in FINAL]
    store = measures.store_bytes_per_s
    disk = measures.disk_bytes_per_s
    segments = {segment.checkpoint: segment for segment in report.segments if segment.state != "failed"}
    return NodeState(
        node=report.node,
        epoch=report.epoch,
        memory_bytes=report.memory_bytes,
        free_bytes=report.memory_bytes - report.memory_used_bytes - _promised_bytes(alive, segments),
        workers=len(alive),
        link=Link(
            bytes_per_s=max(1.0, store.value if store.count else report.bytes_per_s.get("store", store.value)),
            at_s=now_s,
            fetches=_fetches(alive, segments, now_s, now_unix_ns),
        ),
        disk_bytes_per_s=max(1.0, disk.value if disk.count else report.bytes_per_s.get("disk", disk.value)),
        device_bytes_per_s=measures.device_bytes_per_s.value,
        start_s=measures.start_s.value + measures.device_s.value,
        held=_held(report, alive, segments, shapes),
    )


def with_stage(
    state: NodeState, stage: StagePlan, worker: WorkerId, checkpoint: CheckpointId | None, now_s: float
) -> NodeState:
    """After the stage was ordered there: the next decision of the same step counts it."""
    link, held = state.link, state.held
    if checkpoint is not None and stage.missing_bytes:
        known = held.get(checkpoint, Held())
        layers = layer_set(stage.first, stage.end) & ~known.host
        held = {**held, checkpoint: replace(known, coming=known.coming | layers)}
    if checkpoint is not None and stage.store_bytes:
        deadline_s = NEVER if stage.fetch_within_s is None else now_s + stage.fetch_within_s
        link = link.with_fetch(Fetching(worker, checkpoint, stage.store_bytes, deadline_s), now_s)
    return replace(
        state, free_bytes=state.free_bytes - stage.reserved_bytes, workers=state.workers + 1, link=link, held=held
    )


def _promised_bytes(alive: Sequence[OrderSeen], segments: Mapping[CheckpointId, SegmentReport]) -> int:
    """For orders that the node has not answered: the worker's own memory, and that of a segment not opened yet."""
    fetched: dict[CheckpointId, int] = {}
    own_bytes = 0
    for one in alive:
        if one.status is not None:
            continue
        own_bytes += one.order.spec.memory_bytes
        checkpoint = one.order.spec.weights
        if checkpoint is not None and checkpoint not in segments:
            fetched[checkpoint] = max(fetched.get(checkpoint, 0), one.size_bytes)
    return own_bytes + sum(fetched.values())


def _fetches(
    alive: Sequence[OrderSeen], segments: Mapping[CheckpointId, SegmentReport], now_s: float, now_unix_ns: int
) -> tuple[Fetching, ...]:
    """S_i from the segment's own report, D_i from the order and its function's SLO. One a checkpoint: it is shared."""
    found: dict[CheckpointId, Fetching] = {}
    for one in alive:
        order, checkpoint = one.order, one.order.spec.weights
        if checkpoint is None or not one.starting:
            continue
        pending_bytes = _pending_bytes(one, segments.get(checkpoint))
        if not pending_bytes:
            continue
        ends = order.stage.cuts if order.stage is not None else ((0, one.shape.count),)
        cuts = [one.shape.stage(*stage) for stage in ends]
        ordered_s = now_s - (now_unix_ns - order.ordered_unix_ns) / 1e9
        deadline_s = ordered_s + fetch_within_s(order.spec.slo, one.measures, cuts, one.full)
        known = found.get(checkpoint)
        if known is not None:
            pending_bytes = max(pending_bytes, round(known.pending_bytes))
            deadline_s = min(deadline_s, known.deadline_s)
        found[checkpoint] = Fetching(order.worker, checkpoint, pending_bytes, deadline_s)
    return tuple(found.values())


def _pending_bytes(one: OrderSeen, segment: SegmentReport | None) -> int:
    if segment is None:
        return one.size_bytes
    if segment.state == "ready":
        return 0
    if one.order.stage is None or not segment.ranges:
        return max(0, one.size_bytes - segment.ready_bytes)
    return one.shape.size_bytes(one.layers & ~one.shape.layers_in(segment.ranges))


def _held(
    report: NodeReport,
    alive: Sequence[OrderSeen],
    segments: Mapping[CheckpointId, SegmentReport],
    shapes: Mapping[CheckpointId, Shape],
) -> dict[CheckpointId, Held]:
    """In memory and on disk as the report says, chunk by chunk; on the way as the orders of those that start say."""
    held: dict[CheckpointId, Held] = {}
    for checkpoint in segments.keys() | report.disk.keys():
        shape = shapes.get(checkpoint)
        if shape is None:
            continue
        segment, host = segments.get(checkpoint), 0
        if segment is not None:
            host = EVERY_LAYER if segment.state == "ready" else shape.layers_in(segment.ranges)
        held[checkpoint] = Held(host=host, disk=shape.layers_in(report.disk.get(checkpoint, [])))
    for one in alive:
        weights = one.order.spec.weights
        if weights is not None and one.starting:
            known = held.get(weights, Held())
            held[weights] = replace(known, coming=(known.coming | one.layers) & ~known.host)
    return held
