"""Copies in host memory that functions ask for (`keep="host"`): one a checkpoint, in the whole cluster. Pure.

Orders for copies and the nodes as they are go in; orders to write and to take back come out. Each checkpoint has one
order, on a living node that does not drain; a second one only while the copy moves, until the new one is complete. So
the memory that it costs does not grow with the nodes (BlitzScale's O(1) host caching). Copies are spread evenly by
bytes: no node has more than the largest model above another, wherever there is room.

Placement prefers a node that has the checkpoint already, as far as the balance allows it. One copy moves at a time, and
only to where it makes the copies' bytes more even, so moves come to an end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fleetstart.runtime.contract.ids import CheckpointId, NodeId

COPIES_MAX = 2
"""Orders of one checkpoint: one, and another while it moves."""
ANYWHERE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoint:
    """A checkpoint of which a copy is to be kept."""

    size_bytes: int
    regions: frozenset[str] = ANYWHERE
    """Regions in which a copy may be; empty: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyNode:
    """A living node that can hold copies."""

    node: NodeId
    region: str = ""
    room_bytes: int
    """Memory that copies may take, those that it holds included: what its workers need is not in it."""
    used: frozenset[CheckpointId] = frozenset()
    """Checkpoints that its workers use: copies of these take no more memory."""
    held: Mapping[CheckpointId, float] = field(default_factory=dict)
    """Checkpoints that it has already: 1 all in memory, less for a part of it, or for what is on its disk."""
    refuses: frozenset[CheckpointId] = frozenset()
    """Checkpoints that it was to fetch of late, and did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy that is ordered."""

    node: NodeId
    checkpoint: CheckpointId
    ordered_unix_ns: int
    complete: bool = False
    living: bool = True
    """True if its node lives, and has not been started again since."""
    stays: bool = True
    """False if its node drains, or does not fetch it: another must be complete before this one goes."""


@dataclass(slots=True)
class CopyDecision:
    """Changes to the orders of copies."""

    order: list[tuple[NodeId, CheckpointId]] = field(default_factory=list)
    take_back: list[tuple[NodeId, CheckpointId]] = field(default_factory=list)
    unplaced: list[CheckpointId] = field(default_factory=list)
    """Kept checkpoints for which there is no room."""


@dataclass(slots=True)
class _Layout:
    """The copies' bytes on each node, as they will be."""

    nodes: dict[NodeId, CopyNode]
    copied_bytes: dict[NodeId, int]
    room_bytes: dict[NodeId, int]

    def place(self, node: NodeId, checkpoint: CheckpointId, size_bytes: int) -> None:
        if node not in self.nodes:
            return  # its lease is late
        self.copied_bytes[node] += size_bytes
        if checkpoint not in self.nodes[node].used:
            self.room_bytes[node] -= size_bytes

    def stays(self, copy: Copy, kept: KeptCheckpoint) -> bool:
        node = self.nodes.get(copy.node)  # None: its lease is late
        return copy.stays and (node is None or _is_allowed(node, kept))

    def fits(self, node: CopyNode, checkpoint: CheckpointId, kept: KeptCheckpoint) -> bool:
        if checkpoint in node.refuses or not _is_allowed(node, kept):
            return False
        return checkpoint in node.used or kept.size_bytes <= self.room_bytes[node.node]


def _is_allowed(node: CopyNode, kept: KeptCheckpoint) -> bool:
    return not kept.regions or node.region in kept.regions


def decide_copies(
    kept: Mapping[CheckpointId, KeptCheckpoint], copies: Sequence[Copy], nodes: Sequence[CopyNode]
) -> CopyDecision:
    """What is to be ordered and taken back. `copies`: all orders, those of dead nodes too; `nodes`: those
    whose lease is in time and that do not drain. The copies of a node that drains do not stay."""
    decision = CopyDecision()
    there = {one.node: one for one in nodes}
    layout = _Layout(there, dict.fromkeys(there, 0), {one.node: one.room_bytes for one in nodes})
    targets: dict[CheckpointId, Copy] = {}
    by_checkpoint: dict[CheckpointId, list[Copy]] = defaultdict(list)
    for copy in copies:
        if copy.living and copy.checkpoint in kept:
            by_checkpoint[copy.checkpoint].append(copy)
        else:
            decision.take_back.append((copy.node, copy.checkpoint))
    moving = False
    for checkpoint, some in by_checkpoint.items():
        stay = [one for one in some if layout.stays(one, kept[checkpoint])]
        target = max(stay, key=lambda one: (one.ordered_unix_ns, one.node)) if stay else None
        others = sorted((one for one in some if one is not target), key=lambda one: (not one.complete, one.node))
        needed = 0 if target is not None and target.complete else COPIES_MAX - 1
        decision.take_back += [(one.node, checkpoint) for one in others[needed:]]
        if target is not None:
            targets[checkpoint] = target
            layout.place(target.node, checkpoint, kept[checkpoint].size_bytes)
            moving = moving or not target.complete
    for checkpoint in sorted(kept.keys() - targets.keys(), key=lambda one: (-kept[one].size_bytes, one)):
        node = _placed(checkpoint, kept, layout)
        if node is None:
            decision.unplaced.append(checkpoint)
            continue
        layout.place(node, checkpoint, kept[checkpoint].size_bytes)
        decision.order.append((node, checkpoint))
    if not moving and not decision.order:
        decision.order += _move(kept, targets, layout)
    return decision


def _placed(checkpoint: CheckpointId, kept: Mapping[CheckpointId, KeptCheckpoint], layout: _Layout) -> NodeId | None:
    """The node for a new copy: that which has most of it already, among those that it leaves in balance."""
    one = kept[checkpoint]
    fitting = [node for node in layout.nodes.values() if layout.fits(node, checkpoint, one)]
    if not fitting:
        return None
    largest_bytes = max(other.size_bytes for other in kept.values())
    least_bytes = min(layout.copied_bytes[node.node] for node in fitting)
    even = [node for node in fitting if layout.copied_bytes[node.node] + one.size_bytes <= least_bytes + largest_bytes]
    best = min(even, key=lambda node: (-node.held.get(checkpoint, 0.0), layout.copied_bytes[node.node], node.node))
    return best.node


def _move(
    kept: Mapping[CheckpointId, KeptCheckpoint], targets: Mapping[CheckpointId, Copy], layout: _Layout
) -> list[tuple[NodeId, CheckpointId]]:
    """The move that evens the copies' bytes most, if two nodes differ by more than the largest model."""
    if not targets:
        return []
    largest_bytes = max(one.size_bytes for one in kept.values())
    by_node: dict[NodeId, list[CheckpointId]] = defaultdict(list)
    for checkpoint, copy in targets.items():
        by_node[copy.node].append(checkpoint)
    emptiest = sorted(layout.nodes.values(), key=lambda node: (layout.copied_bytes[node.node], node.node))
    for fullest in sorted(by_node.keys() & layout.nodes.keys(), key=lambda node: (-layout.copied_bytes[node], node)):
        for node in emptiest:
            apart_bytes = layout.copied_bytes[fullest] - layout.copied_bytes[node.node]
            if apart_bytes <= largest_bytes:
                break
            fitting = [one for one in by_node[fullest] if layout.fits(node, one, kept[one]) and kept[one].size_bytes]
            if fitting:
                best = min(fitting, key=lambda one: (abs(apart_bytes - 2 * kept[one].size_bytes), one))
                return [(node.node, best)]
    return []
