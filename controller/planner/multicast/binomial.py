"""The binomial pipeline: one source to any number of nodes in the fewest steps, b + ⌈log₂ N⌉ - 1.

N counts the source, as in λScale section 4.2. The nodes are the corners of a hypercube; in step t all exchange blocks
along dimension t mod d: the source sends the next block, each other corner the latest that it has. Where N is no power
of two, corners other than the source's have one or two nodes, and a pair behaves as one corner: one of them sends
outwards while the other passes on to it what it lacks. So each of a pair lacks at most one block that the other has,
and one last step evens them out. Source: Ganesan and Seshadri, "On Cooperative Content Distribution and the Price of
Barter", section 2.3, which λScale and BlitzScale cite; the rule for pairs is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from .schedule import Schedule, Transfer

NOTHING = -1


class _Corner:
    """A corner of the hypercube: a node, or two that together have what the corner has."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self.nodes = nodes
        self.has = 0
        """Bit mask of positions in the order of blocks."""
        self.only = [NOTHING, NOTHING]
        """For each of the pair: the position that it has and the other lacks."""

    def latest(self) -> int:
        return self.has.bit_length() - 1

    def sender_of(self, position: int) -> int:
        """Place, in the pair, of the node that sends a position outwards."""
        if len(self.nodes) == 1:
            return 0
        if position == self.only[0]:
            return 0
        if position == self.only[1]:
            return 1
        return 1 if self.only[0] != NOTHING else 0  # the other is then free to pass on what this one lacks

    def passes_on(self, sender: int, receives: bool) -> list[tuple[int, int]]:
        """(place of the node that passes on, position) within the pair in this step; forgets that it is lacking."""
        if len(self.nodes) == 1:
            return []
        if sender != NOTHING:
            places = [1 - sender]
        else:
            places = [place for place in (0, 1) if self.only[place] != NOTHING]
            if receives:
                places = places[:1]
        passed = [(place, self.only[place]) for place in places if self.only[place] != NOTHING]
        for place, _ in passed:
            self.only[place] = NOTHING
        return passed

    def receive(self, position: int, passed: Sequence[tuple[int, int]], sender: int) -> int:
        """Adds a position from outside; place of the node that takes it, which receives nothing else in this step."""
        self.has |= 1 << position
        if len(self.nodes) == 1:
            return 0
        place = 0 if self.only[0] == NOTHING else 1
        if sender != NOTHING:
            place = 1 - sender
        if passed:
            place = passed[0][0]
        self.only[place] = position
        return place


def binomial_pipeline(nodes: Sequence[int], order: Sequence[int]) -> Schedule:
    """Schedule from the first of the nodes to the others, with the blocks sent in that order."""
    if len(nodes) < 2 or not order:
        return []
    dimensions = len(nodes).bit_length() - 1
    corners = _corners(nodes, dimensions)
    corners[0].has = (1 << len(order)) - 1
    schedule: Schedule = []
    for step in range(len(order) + dimensions - 1):
        _exchange(corners, step, 1 << step % dimensions, order, schedule)
    last = len(order) + dimensions - 1
    for corner in corners:
        _pass_on(corner, corner.passes_on(NOTHING, False), last, order, schedule)
    return schedule


def _corners(nodes: Sequence[int], dimensions: int) -> list[_Corner]:
    """The source alone, then each corner's first node in their order, then the second ones."""
    others = (1 << dimensions) - 1
    singles, seconds = nodes[1 : 1 + others], nodes[1 + others :]
    pairs = [[first, *seconds[place : place + 1]] for place, first in enumerate(singles)]
    return [_Corner(nodes[:1]), *(_Corner(pair) for pair in pairs)]


def _exchange(corners: list[_Corner], step: int, bit: int, order: Sequence[int], schedule: Schedule) -> None:
    """One step along one dimension: first all decide by what they have, then all receive."""
    sends = []
    for number, corner in enumerate(corners):
        position = min(step, len(order) - 1) if number == 0 else corner.latest()
        there = corners[number ^ bit]
        useful = position != NOTHING and not there.has >> position & 1
        sends.append(position if useful else NOTHING)
    senders = [
        corner.sender_of(position) if position != NOTHING else NOTHING
        for corner, position in zip(corners, sends, strict=True)
    ]
    for number, corner in enumerate(corners):
        position, sender = sends[number ^ bit], senders[number]
        passed = corner.passes_on(sender, position != NOTHING)
        _pass_on(corner, passed, step, order, schedule)
        if position != NOTHING:
            source = corners[number ^ bit].nodes[senders[number ^ bit]]
            place = corner.receive(position, passed, sender)
            schedule.append(Transfer(step, source, corner.nodes[place], order[position]))


def _pass_on(
    corner: _Corner, passed: list[tuple[int, int]], step: int, order: Sequence[int], schedule: Schedule
) -> None:
    for place, position in passed:
        schedule.append(Transfer(step, corner.nodes[place], corner.nodes[1 - place], order[position]))
