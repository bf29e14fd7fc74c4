"""One node as the planner sees it: room, speed, what it holds, what it fetches; and how that follows from its report.

Nothing is kept that orders and reports do not say, so a new scheduler sees what the old one saw. A state is good until
the report, an order or a status of that node changes; time alone is accounted for (`Link.at`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fleetstart.runtime.contract.ids import CheckpointId, NodeId, WorkerId
from fleetstart.runtime.contract.node.orders import FINAL, WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.node.reports import NodeReport, SegmentReport

from .checkpoint_layout import EVERY_LAYER, CheckpointLayout, layer_set
from .contention import NEVER, Link, PendingFetch
from .estimates import NodeMeasures
from .plan import StagePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLayers:
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
    held: Mapping[CheckpointId, HeldLayers]
    region: str = ""
    isolations: frozenset[str] = frozenset()
    """Where it is; empty if it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderState:
    """An order on the node, and what is known of its worker and its weights."""

    order: WorkerOrder
    status: WorkerStatus | None
    shape: CheckpointLayout

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


def node_state(
    report: NodeReport,
    seen: Sequence[OrderState],
    measures: NodeMeasures,
    *,
    shapes: Mapping[CheckpointId, CheckpointLayout],
    now_s: float,
    now_unix_ns: int,
) -> NodeState:
    """`shapes` are of the checkpoints that are deployed; of others it counts nothing. `seen` are of this node."""
    alive = [one for one in seen if one.status is None or one.status.state not in FINAL]
    store = measures.store_bytes_per_s
    disk = measures.disk_bytes_per_s
    segments = {segment.checkpoint: segment for segment in report.segments if segment.state != "failed"}
    bytes_per_s = max(1.0, store.value if store.count else report.bytes_per_s.get("store", store.value))
    return NodeState(
        node=report.node,
        epoch=report.epoch,
        memory_bytes=report.memory_bytes,
        free_bytes=report.memory_bytes - report.memory_used_bytes - _promised_bytes(alive, segments),
        workers=len(alive),
        link=Link(
            bytes_per_s=bytes_per_s,
            at_s=now_s,
            fetches=_fetches(alive, segments, bytes_per_s, now_s, now_unix_ns),
        ),
        disk_bytes_per_s=max(1.0, disk.value if disk.count else report.bytes_per_s.get("disk", disk.value)),
        device_bytes_per_s=measures.device_bytes_per_s.value,
        start_s=measures.start_s.value + measures.device_s.value,
        held=_held(report, alive, segments, shapes),
        region=report.region,
        isolations=frozenset(report.isolations),
    )


def with_stage(
    state: NodeState, stage: StagePlan, worker: WorkerId, checkpoint: CheckpointId | None, now_s: float
) -> NodeState:
    """After the stage was ordered there: the next decision of the same step counts it."""
    link, held = state.link, state.held
    if checkpoint is not None and stage.missing_bytes:
        known = held.get(checkpoint, HeldLayers())
        layers = layer_set(stage.first, stage.end) & ~known.host
        held = {**held, checkpoint: replace(known, coming=known.coming | layers)}
    if checkpoint is not None and stage.store_bytes:
        deadline_s = NEVER if stage.fetch_within_s is None else now_s + stage.fetch_within_s
        link = link.with_fetch(PendingFetch(worker, checkpoint, stage.store_bytes, deadline_s), now_s)
    return replace(
        state, free_bytes=state.free_bytes - stage.reserved_bytes, workers=state.workers + 1, link=link, held=held
    )


def _promised_bytes(alive: Sequence[OrderState], segments: Mapping[CheckpointId, SegmentReport]) -> int:
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
    alive: Sequence[OrderState],
    segments: Mapping[CheckpointId, SegmentReport],
    bytes_per_s: float,
    now_s: float,
    now_unix_ns: int,
) -> tuple[PendingFetch, ...]:
    """S_i from the segment's own report, D_i from the order. One a checkpoint: it is shared.

    A report is a second old or two, as long as a stage may take to fetch: eq. 4 tells what has come since.
    """
    found: dict[CheckpointId, PendingFetch] = {}
    counted_unix_ns: dict[CheckpointId, int] = {}
    for one in alive:
        order, checkpoint = one.order, one.order.spec.weights
        if checkpoint is None or not one.starting:
            continue
        segment = segments.get(checkpoint)
        missing_bytes = pending_bytes(one, segment)
        if not missing_bytes:
            continue
        since_unix_ns = max(order.decided_unix_ns, segment.counted_unix_ns if segment is not None else 0)
        deadline_s = now_s + (order.fetch_by_unix_ns - now_unix_ns) / 1e9 if order.fetch_by_unix_ns else NEVER
        known = found.get(checkpoint)
        if known is not None:
            missing_bytes = max(missing_bytes, round(known.pending_bytes))
            deadline_s = min(deadline_s, known.deadline_s)
            since_unix_ns = max(since_unix_ns, counted_unix_ns[checkpoint])
        found[checkpoint] = PendingFetch(order.worker, checkpoint, missing_bytes, deadline_s)
        counted_unix_ns[checkpoint] = since_unix_ns or now_unix_ns
    share = bytes_per_s / max(1, len(found))
    left = [
        fetch._replace(pending_bytes=fetch.pending_bytes - share * (now_unix_ns - counted_unix_ns[checkpoint]) / 1e9)
        for checkpoint, fetch in found.items()
    ]
    return tuple(fetch for fetch in left if fetch.pending_bytes > 0)


def pending_bytes(one: OrderState, segment: SegmentReport | None) -> int:
    """Of what it needs before it is ready, as the node last counted."""
    if segment is None:
        return one.size_bytes
    if segment.state == "ready":
        return 0
    if one.order.stage is None or not segment.ranges:
        return max(0, one.size_bytes - segment.ready_bytes)
    return one.shape.size_bytes(one.layers & ~one.shape.layers_in(segment.ranges))


def _held(
    report: NodeReport,
    alive: Sequence[OrderState],
    segments: Mapping[CheckpointId, SegmentReport],
    shapes: Mapping[CheckpointId, CheckpointLayout],
) -> dict[CheckpointId, HeldLayers]:
    """In memory and on disk as the report says, chunk by chunk; on the way as the orders of those that start say."""
    held: dict[CheckpointId, HeldLayers] = {}
    for checkpoint in segments.keys() | report.disk.keys():
        shape = shapes.get(checkpoint)
        if shape is None:
            continue
        segment, host = segments.get(checkpoint), 0
        if segment is not None:
            host = EVERY_LAYER if segment.state == "ready" else shape.layers_in(segment.ranges)
        held[checkpoint] = HeldLayers(host=host, disk=shape.layers_in(report.disk.get(checkpoint, [])))
    for one in alive:
        weights = one.order.spec.weights
        if weights is not None and one.starting:
            known = held.get(weights, HeldLayers())
            held[weights] = replace(known, coming=(known.coming | one.layers) & ~known.host)
    return held
