"""Ways to send that the multicast benchmark compares, as pulls of each node; nodes are numbers, 0 is the source."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fleetstart.controller.planner.multicast import MulticastNode, MulticastRequest, plan_multicast
from fleetstart.controller.planner.multicast.binomial import binomial_pipeline
from fleetstart.controller.planner.multicast.prediction import Links, predict_arrivals
from fleetstart.controller.planner.multicast.schedule import Schedule, Transfer
from fleetstart.controller.planner.multicast.topologies import binary_tree, chain, sequential
from fleetstart.prefetcher.fetch.pulls import WINDOW
from fleetstart.runtime.contract.ids import NodeId

PIPELINE = "binomial pipeline"
CHAIN = "chain"
TREE = "binary tree (FaaSNet)"
SEQUENTIAL = "sequential"
GLOO = "gloo broadcast"
GLOO_BLOCKS = "gloo broadcast, in blocks"


def from_one(nodes: Sequence[int], order: Sequence[int]) -> Schedule:
    """All receivers read from the source at once, as from a store with the same link: it sends in turn to each."""
    turns = [transfer for place in range(1, len(nodes)) for transfer in chain([nodes[0], nodes[place]], order)]
    return sorted(turns)


WAYS: dict[str, Callable[[Sequence[int], Sequence[int]], Schedule]] = {
    PIPELINE: binomial_pipeline,
    CHAIN: chain,
    TREE: binary_tree,
    SEQUENTIAL: sequential,
    "each from the store": from_one,
}


@dataclass(frozen=True, slots=True)
class Pulls:
    """One node's part: whom it reads from, and (place among these, first chunk, end) in order."""

    peers: list[int]
    pulls: list[tuple[int, int, int]]


def pulls_of(schedule: Schedule, node: int, chunks_a_block: int) -> Pulls:
    peers: list[int] = []
    pulls = []
    for _, sender, receiver, block in sorted(schedule):
        if receiver == node:
            if sender not in peers:
                peers.append(sender)
            pulls.append((peers.index(sender), block * chunks_a_block, (block + 1) * chunks_a_block))
    return Pulls(peers, pulls)


def bound_s(one_s: float, receivers: int, blocks: int) -> float:
    """M/B x (1 + (⌈log₂ N⌉ - 1) / b), N with the source; `one_s` is M/B."""
    return one_s * (1 + (math.ceil(math.log2(receivers + 1)) - 1) / blocks)


def predicted_s(way: str, receivers: int, blocks: int, chunks: int) -> float:
    """The planner's prediction over M/B, for equal links, chunk by chunk as the nodes pull. One after another is no
    plan's way: receivers do not wait for each other."""
    if way == SEQUENTIAL:
        return float(receivers)
    schedule = WAYS[way](range(receivers + 1), range(blocks))
    size = chunks // blocks
    steps = [
        Transfer(step * size + place, sender, receiver, block * size + place)
        for step, sender, receiver, block in schedule
        for place in range(size)
    ]
    rates = [1.0] * (receivers + 1)
    links = Links(up=rates, down=rates, at_once=True, ahead=WINDOW * size - 1)
    held = [(1 << chunks) - 1] + [0] * receivers
    arrivals = predict_arrivals(steps, held, [1 / chunks] * chunks, links)
    return max(max(arrived.values()) for arrived in arrivals[1:])


def planned_way(receivers: int, blocks: int) -> str:
    """The way that the planner takes among equal nodes with one source."""
    nodes = [
        MulticastNode(
            node=NodeId(str(number)), up_bytes_per_s=1.0, down_bytes_per_s=1.0, held=() if number else ((0, blocks),)
        )
        for number in range(receivers + 1)
    ]
    wanted = MulticastRequest(nodes=tuple(nodes), size_bytes=blocks, chunks=blocks, blocks=blocks, block_overhead_s=0)
    return plan_multicast(wanted).name
