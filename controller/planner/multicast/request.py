"""Requests for a multicast: the nodes with their links and blocks, the checkpoint, and what limits the network between.

The same request serves a first plan and a replanned one: a node may hold everything (a source), nothing or some blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from fleetstart.runtime.contract.ids import NodeId

Ranges = tuple[tuple[int, int], ...]
"""(begin, end) of chunks."""

BLOCKS_MOST = 1024
"""Blocks of a replanned multicast at most, after they were divided at the ends of what nodes hold. Planning takes time
in proportion; above it a block that a node has in part counts as lacking, and only its lacking chunks are pulled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MulticastNode:
    """A node that sends, receives, or both."""

    node: NodeId
    up_bytes_per_s: float
    down_bytes_per_s: float
    held: Ranges = ()
    """The chunks that it has in memory."""
    receives: bool = True
    """True if it is to have all chunks; if not, it only sends what it holds."""
    sends: bool = True
    """True if others may be told to read from it: not one that lags, or that has no peer server."""
    busy_sending: bool = False
    """True if serving uses the outgoing direction of its link: it is a source only where there is no other."""
    leaf: str = ""
    """The switch that it is connected to; nodes of one leaf reach each other at the full speed of their links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MulticastRequest:
    """What is to be sent to whom."""

    nodes: tuple[MulticastNode, ...]
    size_bytes: int
    chunks: int
    first_chunks: Ranges = ()
    """Chunks that several sources send before all others, because a node without them serves nothing: both ends of a
    language model are with its first layer."""
    blocks: int = 0
    """Number of blocks, if it is given; 0: as many as suit the measured overhead."""
    block_overhead_s: float = 0.001
    """Time of a block beside its bytes: to ask for it and to begin; measured (`block_count`)."""
    store_bytes_per_s: float = 0.0
    """What the object store gives to all nodes together; 0: nothing may come from there."""
    at_once: bool = True
    """True if holders send at once to all who ask, and not one block at a time."""
    leaf_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Bandwidth of each leaf switch to the others, each way; a leaf that is not named has no limit."""


def block_ranges(chunks: int, blocks: int, held: Sequence[Ranges] = ()) -> list[tuple[int, int]]:
    """(first, end) of each block's chunks, in at most so many blocks of one size; only the last may be smaller, because
    a pipeline goes at the pace of its largest block. They are divided further where what a node holds ends, so that
    each node has all of a block or nothing; above `BLOCKS_MOST` they are not."""
    size = -(-chunks // max(1, blocks))
    ends = {*range(0, chunks, max(1, size)), chunks}
    divided = ends | {min(end, chunks) for ranges in held for pair in ranges for end in pair}
    cuts = sorted(divided if len(divided) <= BLOCKS_MOST else ends)
    return list(pairwise(cuts))


def held_blocks(held: Ranges, blocks: Sequence[tuple[int, int]]) -> int:
    """Bit mask of the blocks whose chunks are all held."""
    return sum(1 << number for number, (first, end) in enumerate(blocks) if not missing_ranges(first, end, held))


def missing_ranges(first: int, end: int, held: Ranges) -> list[tuple[int, int]]:
    """The parts of first .. end - 1 that are not held."""
    missing = []
    for begin, stop in sorted(held):
        if begin > first:
            missing.append((first, min(begin, end)))
        first = max(first, stop)
        if first >= end:
            break
    if first < end:
        missing.append((first, end))
    return [(begin, stop) for begin, stop in missing if begin < stop]


def changed_request(
    request: MulticastRequest,
    *,
    held: Mapping[NodeId, Ranges],
    gone: Sequence[NodeId] = (),
    lagging: Sequence[NodeId] = (),
    joined: Sequence[MulticastNode] = (),
) -> MulticastRequest:
    """The request for what is still to be sent: with the chunks that nodes have by now, without nodes that died, with
    those that joined; who lags goes on receiving, and nobody waits for it."""
    nodes = [
        replace(node, held=held.get(node.node, node.held), sends=node.sends and node.node not in lagging)
        for node in request.nodes
        if node.node not in gone
    ]
    return replace(request, nodes=(*nodes, *joined))
