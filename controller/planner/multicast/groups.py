"""Sub-groups of a multicast from several sources: who gets the model from which source, and in which order of blocks.

λScale's k-way transmission (Algorithm 1): each source has receivers of its own, and the groups begin with different
parts of the model, so that together they hold it after the k-th part of the time. Receivers go to a source on their own
leaf switch where there is one (BlitzScale section 5.1), as evenly as can be, the fastest links first. Departure: λScale
makes groups of ⌊N/k⌋ and N mod k nodes; ours differ by one node, so the largest has ⌈N/k⌉ and takes fewer steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .request import MulticastNode


@dataclass(frozen=True, slots=True)
class SubGroup:
    """A source, its receivers in falling link speed, and the order in which they get the blocks."""

    source: int
    receivers: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        return (self.source, *self.receivers)


def transmission_orders(blocks: int, groups: int, begin_with: Collection[int] = ()) -> list[tuple[int, ...]]:
    """Algorithm 1: the blocks in parts, one a group; each group begins with its own part and goes on with the next.
    The first group's part has all blocks of `begin_with`, also where they are more than its share: a first stage is
    of no use without one of them. Behind a part come the blocks that follow its blocks in the model, since a layer that
    begins in the part may end in them."""
    order = sorted(range(blocks), key=lambda block: (block not in begin_with, block))
    first = max(-(-blocks // groups), len(begin_with)) if groups > 1 else blocks
    size = -(-(blocks - first) // (groups - 1)) if groups > 1 and first > -(-blocks // groups) else first
    ends = [0, *(min(first + size * group, blocks) for group in range(groups))]
    parts = [order[begin:end] for begin, end in pairwise(ends)]
    return [_order([parts[(group + turn) % groups] for turn in range(groups)]) for group in range(groups)]


def _order(parts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    own, others = parts[0], [block for part in parts[1:] for block in part]
    following = {block + 1 for block in own}
    return (*own, *sorted(others, key=lambda block: block not in following))


def sub_groups(
    nodes: Sequence[MulticastNode],
    sources: Sequence[int],
    receivers: Sequence[int],
    blocks: int,
    begin_with: Collection[int] = (),
) -> list[SubGroup]:
    """A group for each of the sources that have receivers; never more groups than receivers, the fastest sources."""
    fastest = sorted(sources, key=lambda source: -nodes[source].up_bytes_per_s)[: len(receivers)]
    if not fastest:
        return []
    most = -(-len(receivers) // len(fastest))
    members: dict[int, list[int]] = {source: [] for source in fastest}
    elsewhere = []
    for receiver in by_speed(nodes, receivers):
        near = [source for source in fastest if nodes[source].leaf == nodes[receiver].leaf]
        source = min(near, key=lambda source: len(members[source]), default=None)
        if source is not None and len(members[source]) < most:
            members[source].append(receiver)
        else:
            elsewhere.append(receiver)
    for receiver in elsewhere:
        members[min(fastest, key=lambda source: len(members[source]))].append(receiver)
    groups = [source for source in fastest if members[source]]
    orders = transmission_orders(blocks, len(groups), begin_with if len(groups) > 1 else ())
    return [
        SubGroup(source, tuple(_by_leaf(nodes, source, members[source])), order)
        for source, order in zip(groups, orders, strict=True)
    ]


def by_speed(nodes: Sequence[MulticastNode], receivers: Sequence[int]) -> list[int]:
    """The receivers in falling link speed."""
    return sorted(receivers, key=lambda receiver: (-_speed(nodes[receiver]), receiver))


def _by_leaf(nodes: Sequence[MulticastNode], source: int, receivers: list[int]) -> list[int]:
    """The source's own leaf first, the others after one another, each with its fastest link first: a chain in this
    order crosses to each leaf once."""
    fastest: dict[str, float] = {}
    for receiver in receivers:
        leaf = nodes[receiver].leaf
        fastest[leaf] = max(fastest.get(leaf, 0.0), _speed(nodes[receiver]))

    def place(receiver: int) -> tuple[bool, float, str, float, int]:
        leaf, speed = nodes[receiver].leaf, _speed(nodes[receiver])
        return leaf != nodes[source].leaf, -fastest[leaf], leaf, -speed, receiver

    return sorted(receivers, key=place)


def _speed(node: MulticastNode) -> float:
    return min(node.up_bytes_per_s, node.down_bytes_per_s)
