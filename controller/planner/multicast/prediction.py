"""Prediction of a multicast: when each block arrives at each node, by discrete events.

A plan is executed by pulls, without steps that all wait for: a node asks for its blocks in order, and for some ahead,
so that the next holder's answer follows the last one's. The model does the same, with the rates of the links. Holders
either send at once to all who ask, and share their links among them, as servers with a thread for each connection do;
or one block at a time, to who asked first among those whose block they have, which a binomial pipeline needs to keep
the pace of its steps. Leaf switches and the store are shared equally by the transfers that pass them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from .schedule import STORE, Schedule

NEVER = float("inf")
Shared = tuple[str, int | str]
"""A node's link in one direction, a leaf switch in one direction, or the store."""
Turn = tuple[int, int]
"""A holder and -1, or a holder and a receiver: what sends one block at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Rates of the nodes' links by number, and of what they share."""

    up: Sequence[float]
    down: Sequence[float]
    overhead_s: float = 0.0
    """Of each block, in addition to its bytes."""
    store: float = NEVER
    leaf: Sequence[str] = ()
    """Each node's leaf switch; empty: all are in one."""
    leaf_rates: dict[str, float] = field(default_factory=dict)
    at_once: bool = False
    """True if holders send to all who ask, and not one block at a time."""
    ahead: int = 0
    """Blocks that a receiver asks for while one arrives."""

    def shared(self, sender: int, receiver: int) -> tuple[Shared, ...]:
        """What a transfer between the two shares with others."""
        found: list[Shared] = []
        if self.at_once:
            found = [("down", receiver)] if sender == STORE else [("up", sender), ("down", receiver)]
        if sender == STORE:
            found.append(("store", STORE))
        elif self.leaf and self.leaf[sender] != self.leaf[receiver]:
            ends = (("from", self.leaf[sender]), ("to", self.leaf[receiver]))
            found += [end for end in ends if end[1] in self.leaf_rates]
        return tuple(found)

    def capacity(self, shared: Shared) -> float:
        kind, which = shared
        if isinstance(which, str):
            return self.leaf_rates[which]
        if kind == "store":
            return self.store
        return self.up[which] if kind == "up" else self.down[which]

    def rate(self, sender: int, receiver: int) -> float:
        return self.down[receiver] if sender == STORE else min(self.up[sender], self.down[receiver])


@dataclass(slots=True)
class _Flow:
    """A transfer under way."""

    sender: int
    receiver: int
    block: int
    left_bytes: float
    rate: float
    own_rate: float
    since_s: float
    shares: tuple[Shared, ...]
    version: int = 0


def predict_arrivals(
    schedule: Schedule, held: Sequence[int], block_bytes: Sequence[float], links: Links
) -> list[dict[int, float]]:
    """Block → time of its arrival, for each node. A pull whose block its holder never gets does not arrive."""
    return _Execution(schedule, held, block_bytes, links).run()


class _Execution:
    def __init__(self, schedule: Schedule, held: Sequence[int], block_bytes: Sequence[float], links: Links) -> None:
        self._links, self._block_bytes = links, block_bytes
        self._has = list(held)
        self._arrivals: list[dict[int, float]] = [{} for _ in held]
        self._pulls: list[list[tuple[int, int, int]]] = [[] for _ in held]
        for step, sender, receiver, block in sorted(schedule, reverse=True):
            self._pulls[receiver].append((step, sender, block))
        self._asking: dict[Turn, list[tuple[float, int, int, int]]] = defaultdict(list)
        """A heap of those whose block is there: when they asked, the step, the receiver, the block."""
        self._waiting: dict[tuple[int, int], list[tuple[float, int, int, int]]] = defaultdict(list)
        """By holder and block that it does not have yet."""
        self._sending: set[Turn] = set()
        self._flows: dict[Shared, list[_Flow]] = defaultdict(list)
        self._ends: list[tuple[float, int, int, _Flow]] = []
        self._count = 0

    def run(self) -> list[dict[int, float]]:
        able = set[Turn]()
        for node in range(len(self._has)):
            for _ in range(1 + self._links.ahead):
                able |= self._ask(node, 0.0)
        self._start(able, 0.0)
        while self._ends:
            now_s = self._ends[0][0]
            able = set()
            while self._ends and self._ends[0][0] <= now_s * (1 + 1e-12):  # all that end together, then what they allow
                _, _, version, flow = heapq.heappop(self._ends)
                if version == flow.version:
                    able |= self._finish(flow, now_s)
            self._start(able, now_s)
        return self._arrivals

    def _turn(self, holder: int, receiver: int) -> Turn:
        return (holder, receiver if self._links.at_once or holder == STORE else -1)

    def _ask(self, receiver: int, now_s: float) -> set[Turn]:
        """The receiver asks for its next block; who may be able to send then."""
        if not self._pulls[receiver]:
            return set()
        step, holder, block = self._pulls[receiver].pop()
        request = (now_s, step, receiver, block)
        if holder != STORE and not self._has[holder] >> block & 1:
            self._waiting[holder, block].append(request)
            return set()
        turn = self._turn(holder, receiver)
        heapq.heappush(self._asking[turn], request)
        return {turn}

    def _finish(self, flow: _Flow, now_s: float) -> set[Turn]:
        """Ends a transfer; who may be able to send now."""
        able = {self._turn(flow.sender, flow.receiver)}
        self._sending -= able
        self._has[flow.receiver] |= 1 << flow.block
        self._arrivals[flow.receiver][flow.block] = now_s
        for request in self._waiting.pop((flow.receiver, flow.block), ()):
            turn = self._turn(flow.receiver, request[2])
            heapq.heappush(self._asking[turn], request)
            able.add(turn)
        for shared in flow.shares:
            self._flows[shared].remove(flow)
        self._share(flow.shares, now_s)
        return able | self._ask(flow.receiver, now_s)

    def _start(self, able: set[Turn], now_s: float) -> None:
        for turn in sorted(able):
            asking, sender = self._asking[turn], turn[0]
            if asking and turn not in self._sending:
                _, _, receiver, block = heapq.heappop(asking)
                self._sending.add(turn)
                rate = self._links.rate(sender, receiver)
                size_bytes = self._block_bytes[block] + self._links.overhead_s * rate
                shares = self._links.shared(sender, receiver)
                flow = _Flow(sender, receiver, block, size_bytes, rate, rate, now_s, shares)
                for shared in shares:
                    self._flows[shared].append(flow)
                self._expect(flow, now_s)
                self._share(shares, now_s)

    def _share(self, shares: tuple[Shared, ...], now_s: float) -> None:
        """Rates anew of all transfers that pass there."""
        for shared in shares:
            for flow in self._flows[shared]:
                parts = [self._links.capacity(part) / len(self._flows[part]) for part in flow.shares]
                rate = min(flow.own_rate, *parts)
                if rate != flow.rate:
                    flow.left_bytes -= (now_s - flow.since_s) * flow.rate
                    flow.rate, flow.since_s, flow.version = rate, now_s, flow.version + 1
                    self._expect(flow, now_s)

    def _expect(self, flow: _Flow, now_s: float) -> None:
        self._count += 1
        heapq.heappush(self._ends, (now_s + flow.left_bytes / flow.rate, self._count, flow.version, flow))
