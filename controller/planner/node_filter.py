"""Node filter: the nodes worth considering for a request, with the parts of its weights that they hold or fetch."""

from __future__ import annotations

from collections.abc import Sequence

from .checkpoint_layout import EVERY_LAYER, CheckpointLayout, Cut
from .cluster import Cluster, NodeSnapshot
from .node_state import HeldLayers
from .peers import Fetch
from .plan import PlanRequest


class CandidateNode:
    """A node that a request may be placed on, with figures for this request at this time."""

    __slots__ = (
        "alone",
        "bytes_per_s",
        "coming_s",
        "fetches",
        "files_bytes",
        "files_s",
        "fits_whole",
        "has_gpu",
        "held",
        "link",
        "missing_bytes",
        "ratio",
        "shared",
        "state",
    )  # fmt: skip

    def __init__(self, snapshot: NodeSnapshot, request: PlanRequest, now_s: float) -> None:
        state, link = snapshot
        self.state = state
        self.link = link
        self.bytes_per_s = link.bytes_per_s
        self.ratio = (len(link.fetches) + 1) / link.bytes_per_s + 1 / state.device_bytes_per_s
        self.shared = state.workers > 0
        self.has_gpu = state.gpus > 0
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
        self.fits_whole = state.free_bytes >= request.memory_bytes + self.missing_bytes


def missing_bytes(held: HeldLayers | None, layers: int, size_bytes: int, layout: CheckpointLayout) -> int:
    """Size of those layers, of `size_bytes` in all, that are neither in the node's memory nor being fetched."""
    return size_bytes if held is None or not size_bytes else layout.size_bytes(layers & ~(held.host | held.coming))


def find_candidate_nodes(
    request: PlanRequest, cluster: Cluster, sizes: Sequence[int], now_s: float
) -> tuple[list[CandidateNode], list[NodeSnapshot]]:
    """The nodes that groups of these sizes may use, fastest first, and those whose links are committed to others."""
    has_weights = request.segment_bytes > 0
    needs = {request.memory_bytes + request.segment_bytes}
    least_bytes = request.memory_bytes
    for size in sizes:
        for cut in request.layout.cuts(size):
            own_bytes = request.own_bytes(cut, full=False)
            least_bytes = min(least_bytes, own_bytes)
            needs.add(own_bytes + cut.size_bytes * has_weights)
            if cluster.gpus:
                needs.add(request.own_bytes(cut, full=False, kv_on_device=True) + cut.size_bytes * has_weights)
    least_fetch = min(cut.size_bytes for cut in request.layout.cuts(max(sizes))) if has_weights else 0
    fetch_bytes = (least_fetch, request.segment_bytes)
    states, refused = cluster.quickest(sorted(needs, reverse=True), fetch_bytes, max(sizes), now_s, request.wanted)
    examined = {snapshot.state.node for snapshot in states}
    holders = cluster.holders(request.checkpoint, least_bytes, now_s, request.wanted)
    nodes = [CandidateNode(snapshot, request, now_s) for snapshot in states]
    holders = [*holders, *cluster.with_trees(request.trees, least_bytes, now_s, request.wanted)]
    for snapshot in holders:
        if snapshot.state.node not in examined:
            examined.add(snapshot.state.node)
            nodes.append(CandidateNode(snapshot, request, now_s))
    # Seconds a byte, times bytes: files that a node has can be worth more than a faster link.
    size_bytes = max(1, request.segment_bytes)
    nodes.sort(key=lambda node: (node.ratio * size_bytes + node.files_s, node.state.node))
    return nodes, refused
