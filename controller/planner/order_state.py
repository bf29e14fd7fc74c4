"""State of an order on a node: the layers of its weights, what is missing of them, and whether it was answered."""

from __future__ import annotations

from dataclasses import dataclass

from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.node.reports import SegmentReport

from .checkpoint_layout import EVERY_LAYER, CheckpointLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderState:
    """An order on the node, with its worker's status and its checkpoint's layout."""

    order: WorkerOrder
    status: WorkerStatus | None
    layout: CheckpointLayout

    @property
    def layers(self) -> int:
        stage = self.order.stage
        return EVERY_LAYER if stage is None else self.layout.stage(stage.first, stage.end).layers

    @property
    def size_bytes(self) -> int:
        """Size of the weights that it needs before it is ready."""
        stage = self.order.stage
        return self.layout.total_bytes if stage is None else self.layout.stage(stage.first, stage.end).size_bytes

    @property
    def starting(self) -> bool:
        return self.order.wanted == "run" and (self.status is None or self.status.state == "starting")

    @property
    def wakes(self) -> bool:
        """Checks whether it was ordered out of a standby, and its node has not answered."""
        return self.order.wanted == "run" and self.status is not None and self.status.memory_bytes > 0

    @property
    def stands_by(self) -> bool:
        """Checks whether it has no part of a device."""
        return self.order.wanted != "run" and self.status is not None and self.status.memory_bytes > 0


def peer_layers(ordered: OrderState) -> int:
    """Its layers that the peers which its order names have, or receive."""
    layers = 0
    for source in ordered.order.sources:
        layers |= ordered.layout.layers_in(source.ranges)
    return layers & ordered.layers


def link_factor(ordered: OrderState, peer_share: float) -> float:
    """Bytes on the link, in those from the store, for each byte that it fetches."""
    if not ordered.order.sources or peer_share == 1.0:
        return 1.0
    from_peers = ordered.layout.size_bytes(peer_layers(ordered)) / max(1, ordered.size_bytes)
    return 1.0 - from_peers * (1.0 - peer_share)


def pending_bytes(ordered: OrderState, segment: SegmentReport | None) -> int:
    """Bytes still to be fetched before the worker is ready, by the node's last count."""
    if segment is None:
        return ordered.size_bytes
    if segment.state == "ready":
        return 0
    if ordered.order.stage is None or not segment.ranges:
        return max(0, ordered.size_bytes - segment.ready_bytes)
    return ordered.layout.size_bytes(ordered.layers & ~ordered.layout.layers_in(segment.ranges))
