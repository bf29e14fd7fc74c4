"""Other topologies: serial chains, which plans may use, and the binary tree and one after another, for comparison.

A chain forwards each block as soon as it is there, so it takes b + n - 2 steps for n nodes, and a slow node at its end
delays nobody else (BlitzScale section 5.1). Several chains of different parts use links of nodes that receive faster
than others send, as its parallel sharded transfer does with a node's devices. FaaSNet's binary tree sends each block
twice from every inner node, which takes some 2b steps. `sequential` sends the whole model from the source to each
receiver in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .binomial import binomial_pipeline
from .schedule import STORE, Schedule, Transfer


def chain(nodes: Sequence[int], order: Sequence[int]) -> Schedule:
    """From the first of the nodes to the second, from there to the third, and so on."""
    return [
        Transfer(position + place, sender, receiver, block)
        for place, (sender, receiver) in enumerate(pairwise(nodes))
        for position, block in enumerate(order)
    ]


def striped_chains(sources: Sequence[int], receivers: Sequence[int], order: Sequence[int]) -> Schedule:
    """Chains of parts of the model, as many as there are receivers or sources, each through all receivers, from another
    one on. A receiver reads the parts at once, from several nodes: where its link takes in more than another one sends,
    it is whole sooner than by one chain. Each is at the end of some chain, and so forwards less than it gets. In each
    chain a node sends and receives at most one block a step."""
    count = max(len(sources), len(receivers))
    size = -(-len(order) // count)
    schedule: Schedule = []
    for number in range(count):
        begin = number * len(receivers) // count
        nodes = (sources[number % len(sources)], *receivers[begin:], *receivers[:begin])
        schedule += chain(nodes, order[size * number : size * (number + 1)])
    return sorted(schedule)


def sequential(nodes: Sequence[int], order: Sequence[int]) -> Schedule:
    return [
        Transfer(turn * len(order) + position, nodes[0], receiver, block)
        for turn, receiver in enumerate(nodes[1:])
        for position, block in enumerate(order)
    ]


def binary_tree(nodes: Sequence[int], order: Sequence[int]) -> Schedule:
    """The node at place i sends each block to those at 2i + 1 and 2i + 2, in turn, as soon as it has it."""
    schedule: Schedule = []
    arrived = [[-1] * len(order) for _ in nodes]
    """Step in which a block arrived, by place and position."""
    for place, node in enumerate(nodes):
        children = [child for child in (2 * place + 1, 2 * place + 2) if child < len(nodes)]
        free = 0
        for position, block in enumerate(order):
            for child in children:
                step = max(free, arrived[place][position] + 1)
                schedule.append(Transfer(step, node, nodes[child], block))
                arrived[child][position], free = step, step + 1
    return sorted(schedule)


def read_once(nodes: Sequence[int], order: Sequence[int]) -> Schedule:
    """A binomial pipeline of a source that sends each block once, such as the store: to the second of the nodes, which
    is the source of the others, a step later. It takes a step more at most."""
    relayed = binomial_pipeline(nodes[1:], order)
    later = [transfer._replace(step=transfer.step + 1) for transfer in relayed]
    return sorted(chain(nodes[:2], order) + later)


def from_store(receivers: Sequence[int], blocks: int) -> Schedule:
    """Each receiver reads everything from the object store."""
    return [Transfer(block, STORE, receiver, block) for block in range(blocks) for receiver in receivers]
