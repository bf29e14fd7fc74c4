"""Node filter: the nodes worth considering for a request, with the parts of its weights that they hold or fetch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from msgspec import structs

from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.devices import DeviceShare, host_bytes

from ..checkpoint_layout import EVERY_LAYER, CheckpointLayout, Cut
from ..cluster import Cluster, NodeSnapshot
from ..devices import DeviceNeed, choose_devices, decode_bytes_per_s, kinds_of, load_bytes_per_s
from ..estimates import slowness
from ..node_state import HeldLayers, NodeState
from ..peers import Fetch
from ..plan import PlanRequest


class CandidateNode:
    """A node that a request may be placed on, with figures for this request at this time."""

    __slots__ = (
        "_shares",
        "alone",
        "bytes_per_s",
        "coming_s",
        "compute_s",
        "fetches",
        "files_bytes",
        "files_s",
        "fits_whole",
        "has_gpu",
        "held",
        "link",
        "missing_bytes",
        "need",
        "ratio",
        "request",
        "shared",
        "state",
    )  # fmt: skip

    def __init__(self, snapshot: NodeSnapshot, request: PlanRequest, now_s: float) -> None:
        state, link = snapshot
        self.state = state
        self.request = request
        self.link = link
        self.bytes_per_s = link.bytes_per_s
        self.need = request.wanted.devices
        self._shares: dict[int, tuple[DeviceShare, ...] | None] = {}
        whole = self.shares(request.device_bytes(request.layout.whole))
        chosen = whole or self.shares(0) or ()
        self.ratio = (len(link.fetches) + 1) / link.bytes_per_s + 1 / self.load_bytes_per_s(chosen)
        self.compute_s = request.measures.prefill_s.value * self.slowness(chosen)
        """Time of the first token on it, once it is ready."""
        self.shared = _is_shared(state, self.need, chosen)
        self.has_gpu = _has_gpu(state, self.need, chosen)
        self.held = state.held.get(request.checkpoint) if request.checkpoint is not None else None
        self.coming_s = 0.0
        """Time until the pending fetch of this checkpoint is done."""
        if self.held is not None and self.held.coming and request.checkpoint is not None:
            self.coming_s = link.pending_s(request.checkpoint, now_s)
        self.files_bytes = sum(tree.size_bytes for tree in request.trees if tree.id not in state.trees)
        self.files_s = 0.0
        """Time until the function's packages and volumes are there."""
        if self.files_bytes:
            written_s = self.files_bytes / state.files_bytes_per_s
            self.files_s = max(link.fetch_s(self.files_bytes, now_s), written_s)
        self.fetches: dict[Cut, Fetch] = {}
        """Cached fetches of the stages considered for this node."""
        self.alone: dict[Cut, Fetch] = {}
        """The same without peers, where there are any."""
        self.missing_bytes = missing_bytes(self.held, EVERY_LAYER, request.segment_bytes, request.layout)
        own_bytes = host_bytes(request.memory_bytes, chosen)
        self.fits_whole = whole is not None and state.free_bytes >= own_bytes + self.missing_bytes

    def shares(self, least_bytes: int) -> tuple[DeviceShare, ...] | None:
        """The devices of a worker that needs so much memory on them; None if they are not free."""
        if self.need is None:
            return ()
        if least_bytes not in self._shares:
            self._shares[least_bytes] = choose_devices(self.need, self.state.devices, least_bytes)
        return self._shares[least_bytes]

    def slowness(self, shares: tuple[DeviceShare, ...]) -> float:
        """Factor of the model's times on these devices."""
        if not shares:
            return 1.0
        request = self.request
        return slowness(request.measures, decode_bytes_per_s(self.state.devices, shares, request.speeds))

    @property
    def least_slowness(self) -> float:
        """Lower bound of `slowness` on whichever of the node's devices."""
        if self.need is None:
            return 1.0
        count, request = self.need.request.count, self.request
        known = [device.decode_bytes_per_s or request.speeds.get(device.type, 0.0) for device in self.state.devices]
        return min([1.0, *(slowness(request.measures, count * speed) for speed in known)])

    def load_bytes_per_s(self, shares: tuple[DeviceShare, ...]) -> float:
        """Rate p from host memory onto these devices."""
        if not shares:
            return self.state.device_bytes_per_s
        return load_bytes_per_s(self.state.devices, shares, self.state.device_bytes_per_s)


def _is_shared(state: NodeState, need: DeviceNeed | None, chosen: tuple[DeviceShare, ...]) -> bool:
    """True if others compute on what a worker would get: on the host, or on the device that it has a share of."""
    if need is None:
        return state.workers > 0
    ids = {share.id for share in chosen}
    return any(device.reserved_bytes > 0 for device in state.devices if device.id in ids)


def _has_gpu(state: NodeState, need: DeviceNeed | None, chosen: tuple[DeviceShare, ...]) -> bool:
    """True if the KV cache would lie in device memory. A node that lists no devices lets every worker have its GPUs."""
    if need is None:
        return state.gpus > 0 and not state.devices
    return "cuda" in kinds_of(state.devices, chosen)


def missing_bytes(held: HeldLayers | None, layers: int, size_bytes: int, layout: CheckpointLayout) -> int:
    """Size of those layers, of `size_bytes` in all, that are neither in the node's memory nor being fetched."""
    return size_bytes if held is None or not size_bytes else layout.size_bytes(layers & ~(held.host | held.coming))


class NodeNeed(NamedTuple):
    """Needs of a worker that its node has to meet."""

    bytes: int
    """Host memory, its weights included."""
    own_bytes: int
    """The part of it that is the worker's own."""
    device_bytes: int


def quickest_nodes(
    request: PlanRequest,
    cluster: Cluster,
    needs: Sequence[NodeNeed],
    fetch_bytes: tuple[int, int],
    enough: int,
    now_s: float,
) -> tuple[list[NodeSnapshot], list[NodeSnapshot]]:
    """`Cluster.quickest` for these needs, among the nodes whose devices are free if it asks for any."""
    devices, fits = request.wanted.devices, None
    if devices is not None:

        def fits(state: NodeState, index: int) -> bool:
            need = needs[index]
            shares = choose_devices(devices, state.devices, need.device_bytes)
            return shares is not None and state.free_bytes >= need.bytes + (
                host_bytes(need.own_bytes, shares) - need.own_bytes
            )

    host_needs = [need.bytes for need in needs]
    return cluster.quickest(host_needs, fetch_bytes, enough, now_s, request.wanted, fits)


def _quickest_by_type(
    request: PlanRequest,
    cluster: Cluster,
    needs: Sequence[NodeNeed],
    fetch_bytes: tuple[int, int],
    enough: int,
    now_s: float,
) -> tuple[list[NodeSnapshot], list[NodeSnapshot]]:
    """`quickest_nodes`; where types of devices differ in compute speed and any will do, those of each type: nodes are
    ranked by their links."""
    need = request.wanted.devices
    if need is None or need.request.type or len(request.speeds) < 2:
        return quickest_nodes(request, cluster, needs, fetch_bytes, enough, now_s)
    found: dict[NodeId, NodeSnapshot] = {}
    refused: dict[NodeId, NodeSnapshot] = {}
    for kind in ("", *sorted(request.speeds)):
        typed = need._replace(request=structs.replace(need.request, type=kind))
        narrowed = replace(request, wanted=request.wanted._replace(devices=typed))
        quick, committed = quickest_nodes(narrowed, cluster, needs, fetch_bytes, enough, now_s)
        found |= {snapshot.state.node: snapshot for snapshot in quick}
        refused |= {snapshot.state.node: snapshot for snapshot in committed}
    return list(found.values()), [snapshot for node, snapshot in refused.items() if node not in found]


def find_candidate_nodes(
    request: PlanRequest, cluster: Cluster, sizes: Sequence[int], now_s: float
) -> tuple[list[CandidateNode], list[NodeSnapshot]]:
    """The nodes that groups of these sizes may use, fastest first, and those whose links are committed to others."""
    has_weights = request.segment_bytes > 0
    whole_bytes = request.device_bytes(request.layout.whole)
    needs = {NodeNeed(request.memory_bytes + request.segment_bytes, request.memory_bytes, whole_bytes)}
    least_bytes = request.memory_bytes
    for size in sizes:
        for cut in request.layout.cuts(size):
            own_bytes = request.own_bytes(cut, full=False)
            least_bytes = min(least_bytes, own_bytes)
            weights_bytes, device_bytes = cut.size_bytes * has_weights, request.device_bytes(cut)
            needs.add(NodeNeed(own_bytes + weights_bytes, own_bytes, device_bytes))
            if cluster.gpus:
                own_bytes = request.own_bytes(cut, full=False, kv_on_device=True)
                needs.add(NodeNeed(own_bytes + weights_bytes, own_bytes, device_bytes))
    least_fetch = min(cut.size_bytes for cut in request.layout.cuts(max(sizes))) if has_weights else 0
    fetch_bytes = (least_fetch, request.segment_bytes)
    states, refused = _quickest_by_type(request, cluster, sorted(needs, reverse=True), fetch_bytes, max(sizes), now_s)
    examined = {snapshot.state.node for snapshot in states}
    holders = cluster.holders(request.checkpoint, least_bytes, now_s, request.wanted)
    nodes = [CandidateNode(snapshot, request, now_s) for snapshot in states]
    holders = [*holders, *cluster.with_trees(request.trees, least_bytes, now_s, request.wanted)]
    for snapshot in holders:
        if snapshot.state.node not in examined:
            examined.add(snapshot.state.node)
            nodes.append(CandidateNode(snapshot, request, now_s))
    # Seconds a byte, times bytes: files that a node has, or a faster device, can be worth more than a faster link.
    size_bytes = max(1, request.segment_bytes)
    nodes.sort(key=lambda node: (node.ratio * size_bytes + node.files_s + node.compute_s, node.state.node))
    return nodes, refused
