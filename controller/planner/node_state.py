"""Node state for the planner: free memory, speeds, held layers and fetches, derived from report, orders and statuses.

Nothing is kept beyond orders and reports, so a new scheduler sees what the old one saw. A state is valid until the
report, an order or a status of that node changes; the passing of time is accounted for (`Link.at`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fleetstart.runtime.contract.identity import is_loopback
from fleetstart.runtime.contract.ids import CheckpointId, LayerId, NodeId, WorkerId
from fleetstart.runtime.contract.node.devices import DeviceId, DeviceReport, host_bytes
from fleetstart.runtime.contract.node.orders import FINAL
from fleetstart.runtime.contract.node.reports import Confinement, NodeReport, SegmentReport

from .checkpoint_layout import EVERY_LAYER, CheckpointLayout, layer_set
from .devices import with_bytes, with_reserved
from .estimates import NodeMeasures
from .links.contention import NEVER, Link, PendingFetch
from .links.uplinks import PairRate, uplink_bytes_per_s
from .order_state import OrderState, link_factor, pending_bytes
from .plan import FileTree, StagePlan

FILES_BYTES_PER_S = 150e6
"""Before a node has fetched packages or volumes: thousands of small files are slower to write than one large one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLayers:
    """The parts of one checkpoint that a node holds, as sets of layers."""

    host: int = 0
    coming: int = 0
    """Layers being fetched for a starting worker; another one shares the fetch."""
    disk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A node's capacity and contents at one time."""

    node: NodeId
    epoch: str
    memory_bytes: int
    free_bytes: int
    """Free memory, less the reservations of ordered workers and their fetches."""
    workers: int
    """Number of workers, running or ordered; with 0 its device is free."""
    link: Link
    up: Link | None = None
    """Its uplink, with what other nodes fetch from it; None if it serves no chunks."""
    peer_bytes_per_s: float | None = None
    """Measured rate at which it reads from peers; None: as fast as from the store."""
    probed_bytes_per_s: float = 0.0
    """Rate that it measured when it came up, and shared the store with nobody; 0 if it does not say."""
    disk_bytes_per_s: float
    device_bytes_per_s: float
    start_s: float
    """t_cc + t_cu."""
    held: Mapping[CheckpointId, HeldLayers]
    trees: frozenset[LayerId] = frozenset()
    """Packages and versions of volumes on its disk, or promised to it in this step."""
    files_bytes_per_s: float = FILES_BYTES_PER_S
    """Rate at which it fetches and writes them."""
    region: str = ""
    leaf: str = ""
    """The leaf switch that it is connected to; empty if it does not say."""
    machine: str = ""
    peers_on: str = ""
    """The machine whose nodes alone reach its peer server, as it listens on loopback; empty: any."""
    isolations: frozenset[str] = frozenset()
    """Supported isolations beyond namespaces."""
    confines: Confinement = "namespaces"
    """What it runs workers without gVisor in."""
    isolation_refused: str = ""
    """The call that its kernel refused, if it has no namespaces."""
    runs: str = ""
    """Its Python and platform; empty if it does not say."""
    pools: frozenset[str] = frozenset()
    """Pools of workers that it can start; empty if it does not say."""
    gpus: int = 0
    devices: tuple[DeviceReport, ...] = ()
    """Its devices, with what ordered workers have reserved of each."""

    @property
    def from_peers_bytes_per_s(self) -> float:
        return self.peer_bytes_per_s or self.link.bytes_per_s

    @property
    def down_bytes_per_s(self) -> float:
        """The fastest rate at which it has received anything: its link takes as much, when a busy store gives less."""
        return max(self.link.bytes_per_s, self.peer_bytes_per_s or 0.0, self.probed_bytes_per_s)

    def link_bytes(self, store_bytes: float, peer_bytes: float) -> float:
        """A fetch in bytes from the store that would keep the link busy for as long. Where peers were found to be
        faster, the store is slower than the link."""
        if self.peer_bytes_per_s is None:
            return store_bytes + peer_bytes
        return store_bytes + peer_bytes * self.link.bytes_per_s / max(self.link.bytes_per_s, self.peer_bytes_per_s)


def node_state(
    report: NodeReport,
    orders: Sequence[OrderState],
    measures: NodeMeasures,
    *,
    layouts: Mapping[CheckpointId, CheckpointLayout],
    now_s: float,
    now_unix_ns: int,
    uploads: Sequence[PendingFetch] = (),
    copies: Iterable[CheckpointId] = (),
    read_at: Iterable[PairRate] = (),
) -> NodeState:
    """Derives a node's state. `layouts`: layouts of the deployed checkpoints; others are ignored. `uploads`: what other
    nodes fetch from it. `copies`: checkpoints that it is to hold whether a worker uses them or not. `read_at`: rates at
    which others have read from it."""
    alive = [ordered for ordered in orders if ordered.status is None or ordered.status.state not in FINAL]
    store = measures.store_bytes_per_s
    disk = measures.disk_bytes_per_s
    segments = {segment.checkpoint: segment for segment in report.segments if segment.state != "failed"}
    bytes_per_s = max(1.0, store.value if store.count else _told(report, "store") or store.value)
    peer = measures.peer_bytes_per_s
    peer_bytes_per_s = (peer.value if peer.count else report.bytes_per_s.get("peer")) or None
    probed_bytes_per_s = report.measured.get("store", 0.0)
    from_sources_bytes_per_s = max(bytes_per_s, peer_bytes_per_s or 0.0)
    peer_share = bytes_per_s / from_sources_bytes_per_s
    return NodeState(
        node=report.node,
        epoch=report.epoch,
        memory_bytes=report.memory_bytes,
        free_bytes=report.memory_bytes - report.memory_used_bytes - _promised_bytes(alive, segments, copies, layouts),
        workers=len(alive),
        link=Link(
            bytes_per_s=bytes_per_s,
            at_s=now_s,
            fetches=_fetches(alive, segments, bytes_per_s, peer_share, now_s, now_unix_ns),
        ),
        up=uplink(max(from_sources_bytes_per_s, probed_bytes_per_s), read_at, uploads, now_s)
        if report.peer_address
        else None,
        peer_bytes_per_s=peer_bytes_per_s,
        probed_bytes_per_s=probed_bytes_per_s,
        disk_bytes_per_s=max(1.0, disk.value if disk.count else _told(report, "disk") or disk.value),
        device_bytes_per_s=_device_bytes_per_s(report, measures),
        start_s=measures.start_s.value + measures.device_s.value,
        held=_held(report, alive, segments, layouts),
        trees=frozenset(report.layers).union(report.volumes),
        files_bytes_per_s=max(1.0, report.bytes_per_s.get("layers", FILES_BYTES_PER_S)),
        region=report.region,
        leaf=report.leaf,
        machine=report.machine,
        peers_on=report.machine if is_loopback(report.peer_address.rpartition(":")[0]) else "",
        isolations=frozenset(report.isolations),
        confines=report.confines,
        isolation_refused=report.isolation_refused,
        pools=frozenset(report.pools),
        runs=report.runs,
        gpus=report.gpus,
        devices=_devices(report, alive),
    )


def _device_bytes_per_s(report: NodeReport, measures: NodeMeasures) -> float:
    """Rate p of a device that has loaded nothing yet: that of others of the node, or else the prior."""
    known = [device.load_bytes_per_s for device in report.devices if device.load_bytes_per_s]
    return max(1.0, sum(known) / len(known)) if known else measures.device_bytes_per_s.value


def _devices(report: NodeReport, alive: Sequence[OrderState]) -> tuple[DeviceReport, ...]:
    """The node's devices with their reservations: those of the report and of orders that it has not answered, or those
    of all orders where that is more, as a report may be older than a status."""
    if not report.devices:
        return ()
    ordered: Counter[DeviceId] = Counter()
    unanswered: Counter[DeviceId] = Counter()
    for one in alive:
        for share in one.order.devices if not one.stands_by else ():
            ordered[share.id] += share.memory_bytes
            unanswered[share.id] += share.memory_bytes if one.status is None or one.wakes else 0
    return tuple(
        with_bytes(device, max(device.reserved_bytes + unanswered[device.id], ordered[device.id]))
        for device in report.devices
    )


def _told(report: NodeReport, source: Literal["store", "disk"]) -> float:
    """The rate of the node's own fetches, or else what it measured when it came up; 0 if it tells neither."""
    return report.bytes_per_s.get(source) or report.measured.get(source) or 0.0


def uplink(
    received_bytes_per_s: float, read_at: Iterable[PairRate], uploads: Sequence[PendingFetch], now_s: float
) -> Link:
    """A node's uplink, with the rate at which it receives unless its readers have measured another one."""
    rate = uplink_bytes_per_s(received_bytes_per_s, read_at)
    return Link(bytes_per_s=max(1.0, rate), at_s=now_s, fetches=tuple(uploads))


def with_stage(
    state: NodeState,
    stage: StagePlan,
    worker: WorkerId,
    checkpoint: CheckpointId | None,
    now_s: float,
    trees: Iterable[FileTree] = (),
) -> NodeState:
    """The state after a stage was ordered on the node, for the next decision of the same step."""
    link, held = state.link, state.held
    if checkpoint is not None and stage.missing_bytes:
        known = held.get(checkpoint, HeldLayers())
        layers = layer_set(stage.first, stage.end) & ~known.host
        held = {**held, checkpoint: replace(known, coming=known.coming | layers)}
    if checkpoint is not None and (stage.store_bytes or stage.peers):
        pending_bytes = state.link_bytes(stage.store_bytes, stage.peer_bytes)
        link = link.with_fetch(PendingFetch(worker, checkpoint, pending_bytes, _deadline_s(stage, now_s)), now_s)
    return replace(
        state,
        free_bytes=state.free_bytes - stage.reserved_bytes,
        devices=with_reserved(state.devices, stage.devices) if stage.devices else state.devices,
        workers=state.workers + 1,
        link=link,
        held=held,
        trees=state.trees.union(tree.id for tree in trees),
    )


def with_upload(
    state: NodeState, size_bytes: int, stage: StagePlan, worker: WorkerId, checkpoint: CheckpointId, now_s: float
) -> NodeState:
    """The state after a stage was ordered elsewhere that fetches so many bytes from the node."""
    if state.up is None:
        return state
    upload = PendingFetch(worker, checkpoint, size_bytes, _deadline_s(stage, now_s))
    return replace(state, up=state.up.with_fetch(upload, now_s))


def _deadline_s(stage: StagePlan, now_s: float) -> float:
    return NEVER if stage.fetch_within_s is None else now_s + stage.fetch_within_s


def _promised_bytes(
    alive: Sequence[OrderState],
    segments: Mapping[CheckpointId, SegmentReport],
    copies: Iterable[CheckpointId],
    layouts: Mapping[CheckpointId, CheckpointLayout],
) -> int:
    """Memory reserved for unanswered orders: the workers' own, what those that are woken take again, and that of
    segments not opened yet, of which a worker and a copy of the same checkpoint share one."""
    fetched: dict[CheckpointId, int] = {}
    own_bytes = 0
    for ordered in alive:
        if ordered.status is not None:
            if ordered.wakes:
                own_bytes += host_bytes(ordered.order.spec.memory_bytes, ordered.order.devices)
                own_bytes -= ordered.status.memory_bytes
            continue
        own_bytes += host_bytes(ordered.order.spec.memory_bytes, ordered.order.devices)
        checkpoint = ordered.order.spec.weights
        if checkpoint is not None and checkpoint not in segments:
            fetched[checkpoint] = max(fetched.get(checkpoint, 0), ordered.size_bytes)
    for checkpoint in copies:
        if checkpoint in layouts:
            missing_bytes = _unopened_bytes(layouts[checkpoint], segments.get(checkpoint))
            fetched[checkpoint] = max(fetched.get(checkpoint, 0), missing_bytes)
    return own_bytes + sum(fetched.values())


def _unopened_bytes(layout: CheckpointLayout, segment: SegmentReport | None) -> int:
    """Memory that a copy takes beyond what the node counts. A segment that is filled for it has all of it from the
    beginning; one that has a stage's chunks gets the rest."""
    if segment is None:
        return layout.total_bytes
    return max(0, layout.total_bytes - segment.ready_bytes) if segment.state == "partial" else 0


def _fetches(
    alive: Sequence[OrderState],
    segments: Mapping[CheckpointId, SegmentReport],
    bytes_per_s: float,
    peer_share: float,
    now_s: float,
    now_unix_ns: int,
) -> tuple[PendingFetch, ...]:
    """S_i from the segment's own report, D_i from the order. One a checkpoint: it is shared. `peer_share`: the part of
    the link that a byte from a peer takes, against one from the store.

    A report is a second old or two, as long as a stage may take to fetch: eq. 4 tells what has come since.
    """
    fetches: dict[CheckpointId, PendingFetch] = {}
    counted_unix_ns: dict[CheckpointId, int] = {}
    for ordered in alive:
        order, checkpoint = ordered.order, ordered.order.spec.weights
        if checkpoint is None or not ordered.starting:
            continue
        segment = segments.get(checkpoint)
        missing_bytes = pending_bytes(ordered, segment)
        if not missing_bytes:
            continue
        since_unix_ns = max(order.decided_unix_ns, segment.counted_unix_ns if segment is not None else 0)
        deadline_s = now_s + (order.fetch_by_unix_ns - now_unix_ns) / 1e9 if order.fetch_by_unix_ns else NEVER
        missing_bytes = round(missing_bytes * link_factor(ordered, peer_share))
        known = fetches.get(checkpoint)
        if known is not None:
            missing_bytes = max(missing_bytes, round(known.pending_bytes))
            deadline_s = min(deadline_s, known.deadline_s)
            since_unix_ns = max(since_unix_ns, counted_unix_ns[checkpoint])
        fetches[checkpoint] = PendingFetch(order.worker, checkpoint, missing_bytes, deadline_s)
        counted_unix_ns[checkpoint] = since_unix_ns or now_unix_ns
    share = bytes_per_s / max(1, len(fetches))
    left = [
        fetch._replace(pending_bytes=fetch.pending_bytes - share * (now_unix_ns - counted_unix_ns[checkpoint]) / 1e9)
        for checkpoint, fetch in fetches.items()
    ]
    return tuple(fetch for fetch in left if fetch.pending_bytes > 0)


def _held(
    report: NodeReport,
    alive: Sequence[OrderState],
    segments: Mapping[CheckpointId, SegmentReport],
    layouts: Mapping[CheckpointId, CheckpointLayout],
) -> dict[CheckpointId, HeldLayers]:
    """Held layers: in memory and on disk by the report, chunk by chunk; being fetched by the orders of starting
    workers."""
    held: dict[CheckpointId, HeldLayers] = {}
    for checkpoint in segments.keys() | report.disk.keys():
        layout = layouts.get(checkpoint)
        if layout is None:
            continue
        segment, host = segments.get(checkpoint), 0
        if segment is not None:
            host = EVERY_LAYER if segment.state == "ready" else layout.layers_in(segment.ranges)
        held[checkpoint] = HeldLayers(host=host, disk=layout.layers_in(report.disk.get(checkpoint, [])))
    for ordered in alive:
        weights = ordered.order.spec.weights
        if weights is not None and ordered.starting:
            known = held.get(weights, HeldLayers())
            held[weights] = replace(known, coming=(known.coming | ordered.layers) & ~known.host)
    return held
