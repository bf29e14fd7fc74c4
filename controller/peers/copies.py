"""Copies in host memory that functions ask for (`keep="host"`): one a checkpoint, in the whole cluster. Pure.

Orders for copies and the nodes as they are go in; orders to write and to take back come out. Each checkpoint has one
order, on a living node that does not drain; a second one only while the copy moves, until the new one is complete. So
the memory that it costs does not grow with the nodes (BlitzScale's O(1) host caching). Functions of other regions have
a copy of their own, as none reads quickly across regions; one that is in the regions of several functions serves all.
Copies are spread evenly by bytes: no node has more than the largest model above another, wherever there is room.

Placement prefers a node that has the checkpoint already, as far as the balance allows it. One copy moves at a time, and
only to where it makes the copies' bytes more even, so moves come to an end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fleetstart.runtime.contract.ids import CheckpointId, NodeId

COPIES_MAX = 2
"""Orders of one checkpoint for the same regions: one, and another while it moves."""
Regions = frozenset[str]
"""Regions in which a copy may be; empty: any."""
ANYWHERE: Regions = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoint:
    """A checkpoint of which a copy is to be kept."""

    size_bytes: int
    regions: frozenset[Regions] = frozenset({ANYWHERE})
    """Regions of the functions that ask for it: each of these is to have a copy."""

    @property
    def narrowest_first(self) -> list[Regions]:
        """Regions in the order in which they get copies: one in few regions may serve those who allow more."""
        return sorted(self.regions, key=lambda one: (not one, len(one), sorted(one)))


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
    region: str | None = None
    """Region of its node; None: not known, as the node has not reported yet."""
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


@dataclass(slots=True, kw_only=True)
class _Target:
    """A copy that is to stay."""

    copy: Copy
    serves: list[Regions]
    """Regions that are asked for and have no other copy: wherever it moves, it serves them."""


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

    def fits(self, node: CopyNode, checkpoint: CheckpointId, size_bytes: int, serves: Collection[Regions]) -> bool:
        if checkpoint in node.refuses or not all(is_in(node.region, regions) for regions in serves):
            return False
        return checkpoint in node.used or size_bytes <= self.room_bytes[node.node]


def is_in(region: str | None, regions: Regions) -> bool:
    """True if a node's region is one of these, or may be."""
    return not regions or region is None or region in regions


def decide_copies(
    kept: Mapping[CheckpointId, KeptCheckpoint], copies: Sequence[Copy], nodes: Sequence[CopyNode]
) -> CopyDecision:
    """What is to be ordered and taken back. `copies`: all orders, those of dead nodes too; `nodes`: those
    whose lease is in time and that do not drain. The copies of a node that drains do not stay."""
    decision = CopyDecision()
    there = {one.node: one for one in nodes}
    layout = _Layout(there, dict.fromkeys(there, 0), {one.node: one.room_bytes for one in nodes})
    targets: dict[CheckpointId, list[_Target]] = {}
    by_checkpoint: dict[CheckpointId, list[Copy]] = defaultdict(list)
    for copy in copies:
        if copy.living and copy.checkpoint in kept:
            by_checkpoint[copy.checkpoint].append(copy)
        else:
            decision.take_back.append((copy.node, copy.checkpoint))
    moving = False
    for checkpoint, some in by_checkpoint.items():
        targets[checkpoint] = chosen = _targets(kept[checkpoint], some)
        needed = {one.copy.node for one in chosen} | _needed_meanwhile(kept[checkpoint], some, chosen)
        spare = sorted((one for one in some if one.node not in needed), key=lambda one: (not one.complete, one.node))
        decision.take_back += [(one.node, checkpoint) for one in spare]
        for target in chosen:
            layout.place(target.copy.node, checkpoint, kept[checkpoint].size_bytes)
            moving = moving or not target.copy.complete
    for checkpoint in sorted(kept, key=lambda one: (-kept[one].size_bytes, one)):
        _place_missing(checkpoint, kept, targets.get(checkpoint, ()), layout, decision)
    if not moving and not decision.order:
        decision.order += _move(kept, targets, layout)
    return decision


def _targets(kept: KeptCheckpoint, some: Sequence[Copy]) -> list[_Target]:
    """The copies of a checkpoint that are to stay: for each of the regions the newest one there."""
    chosen: list[_Target] = []
    for regions in kept.narrowest_first:
        staying = [one for one in some if one.stays and is_in(one.region, regions)]
        known = [one for one in staying if one.region is not None or not regions]
        serving = next((one for one in chosen if one.copy in known), None)
        if serving is not None:
            serving.serves.append(regions)
        elif free := known or [one for one in staying if all(one is not other.copy for other in chosen)]:
            newest = max(free, key=lambda one: (one.ordered_unix_ns, one.node))
            chosen.append(_Target(copy=newest, serves=[regions]))
    return chosen


def _needed_meanwhile(kept: KeptCheckpoint, some: Sequence[Copy], chosen: Sequence[_Target]) -> set[NodeId]:
    """The nodes whose copies serve until others are complete: for each of the regions without a complete copy one
    there, or any if there is nothing else to read from."""
    complete = {regions for one in chosen if one.copy.complete for regions in one.serves}
    needed: set[NodeId] = set()
    for regions in kept.narrowest_first:
        if regions in complete:
            continue
        others = [one for one in some if one.node not in needed and all(one is not other.copy for other in chosen)]
        there = [one for one in others if is_in(one.region, regions)]
        if free := there or ([] if complete or needed else others):
            needed.add(min(free, key=lambda one: (not one.complete, one.node)).node)
    return needed


def _place_missing(
    checkpoint: CheckpointId,
    kept: Mapping[CheckpointId, KeptCheckpoint],
    targets: Sequence[_Target],
    layout: _Layout,
    decision: CopyDecision,
) -> None:
    """Orders the copies of a checkpoint for the regions that have none. A new one may serve several."""
    served, placed = {regions for one in targets for regions in one.serves}, list[NodeId]()
    for regions in kept[checkpoint].narrowest_first:
        if regions in served or any(is_in(layout.nodes[node].region, regions) for node in placed):
            continue
        node = _placed(checkpoint, regions, kept, layout)
        if node is not None:
            layout.place(node, checkpoint, kept[checkpoint].size_bytes)
            decision.order.append((node, checkpoint))
            placed.append(node)
        elif checkpoint not in decision.unplaced:
            decision.unplaced.append(checkpoint)


def _placed(
    checkpoint: CheckpointId, regions: Regions, kept: Mapping[CheckpointId, KeptCheckpoint], layout: _Layout
) -> NodeId | None:
    """The node for a new copy: that which has most of it already, among those that it leaves in balance."""
    size_bytes = kept[checkpoint].size_bytes
    fitting = [node for node in layout.nodes.values() if layout.fits(node, checkpoint, size_bytes, [regions])]
    if not fitting:
        return None
    largest_bytes = max(other.size_bytes for other in kept.values())
    least_bytes = min(layout.copied_bytes[node.node] for node in fitting)
    even = [node for node in fitting if layout.copied_bytes[node.node] + size_bytes <= least_bytes + largest_bytes]
    best = min(even, key=lambda node: (-node.held.get(checkpoint, 0.0), layout.copied_bytes[node.node], node.node))
    return best.node


def _move(
    kept: Mapping[CheckpointId, KeptCheckpoint],
    targets: Mapping[CheckpointId, Sequence[_Target]],
    layout: _Layout,
) -> list[tuple[NodeId, CheckpointId]]:
    """The move that evens the copies' bytes most, if two nodes differ by more than the largest model."""
    if not targets:
        return []
    largest_bytes = max(one.size_bytes for one in kept.values())
    by_node: dict[NodeId, dict[CheckpointId, _Target]] = defaultdict(dict)
    for checkpoint, some in targets.items():
        for target in some:
            by_node[target.copy.node][checkpoint] = target
    emptiest = sorted(layout.nodes.values(), key=lambda node: (layout.copied_bytes[node.node], node.node))
    for fullest in sorted(by_node.keys() & layout.nodes.keys(), key=lambda node: (-layout.copied_bytes[node], node)):
        for node in emptiest:
            apart_bytes = layout.copied_bytes[fullest] - layout.copied_bytes[node.node]
            if apart_bytes <= largest_bytes:
                break
            fitting = [
                checkpoint
                for checkpoint, target in by_node[fullest].items()
                if (size_bytes := kept[checkpoint].size_bytes)
                and checkpoint not in by_node[node.node]
                and layout.fits(node, checkpoint, size_bytes, target.serves)
            ]
            if fitting:
                best = min(fitting, key=lambda one: (abs(apart_bytes - 2 * kept[one].size_bytes), one))
                return [(node.node, best)]
    return []
