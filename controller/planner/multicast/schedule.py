"""Schedules of a multicast: which node sends which block to which other in each step, and the laws that they keep.

A step is the time of one block between two nodes. In a step a node sends at most one block and receives at most one;
what it sends it had before the step. Nodes and blocks are numbers here; -1 is the object store, which sends to any
number of nodes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

STORE = -1


class Transfer(NamedTuple):
    """One block from one node to another, in one step; sorted, the order of execution."""

    step: int
    sender: int
    receiver: int
    block: int


Schedule = list[Transfer]


def steps(schedule: Schedule) -> int:
    return max([transfer.step for transfer in schedule], default=-1) + 1


def broken_law(schedule: Schedule, held: Sequence[int], receivers: Sequence[int], blocks: int) -> str:
    """The first law that a schedule breaks, in words; empty if it keeps all. `held`: bit mask of each node's blocks
    before the first step."""
    has = list(held)
    arrived: list[tuple[int, int]] = []
    last_step, senders, getters = -1, set[int](), set[int]()
    for step, sender, receiver, block in sorted(schedule):
        if step != last_step:
            for node, got in arrived:
                has[node] |= 1 << got
            arrived, last_step, senders, getters = [], step, set(), set()
        if sender != STORE and not has[sender] >> block & 1:
            return f"step {step}: node {sender} sends block {block}, which it does not have"
        if sender in senders or receiver in getters:
            return f"step {step}: node {sender} sends twice, or node {receiver} receives twice"
        if has[receiver] >> block & 1:
            return f"step {step}: node {receiver} has block {block} already"
        if sender != STORE:
            senders.add(sender)
        getters.add(receiver)
        arrived.append((receiver, block))
    for node, got in arrived:
        has[node] |= 1 << got
    for receiver in receivers:
        if has[receiver] != (1 << blocks) - 1:
            return f"node {receiver} lacks blocks in the end"
    return ""
