"""Prediction of a multicast: when each block arrives at each node, by discrete events.

A plan is executed by pulls, without steps that all wait for: a node asks for its blocks in order, one at a time; a
holder sends one block at a time, to who asked first among those whose block it has. The model does the same, with the
rates of the links: a transfer goes at the slower of the two ends. Leaf switches and the store are shared equally by the
transfers that pass them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from .schedule import STORE, Schedule

NEVER = float("inf")


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

    def shared(self, sender: int, receiver: int) -> tuple[Hashable, ...]:
        """What a transfer between the two shares with others."""
        if sender == STORE:
            return (STORE,)
        if not self.leaf or self.leaf[sender] == self.leaf[receiver]:
            return ()
        ends = (("from", self.leaf[sender]), ("to", self.leaf[receiver]))
        return tuple(end for end in ends if end[1] in self.leaf_rates)

    def capacity(self, shared: Hashable) -> float:
        return self.store if shared == STORE else self.leaf_rates[shared[1]]  # type: ignore[index]

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
    shares: tuple[Hashable, ...]
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
        self._asking: dict[int, list[tuple[float, int, int, int]]] = defaultdict(list)
        """By holder, a heap of those whose block is there: when they asked, the step, the receiver, the block."""
        self._waiting: dict[tuple[int, int], list[tuple[float, int, int, int]]] = defaultdict(list)
        """By holder and block that it does not have yet."""
        self._sending: set[int] = set()
        self._flows: dict[Hashable, list[_Flow]] = defaultdict(list)
        self._ends: list[tuple[float, int, int, _Flow]] = []
        self._count = 0

    def run(self) -> list[dict[int, float]]:
        able = {self._ask(node, 0.0) for node in range(len(self._has))}
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

    def _ask(self, receiver: int, now_s: float) -> int:
        """The receiver asks for its next block; the holder that it asks, if it has the block."""
        if not self._pulls[receiver]:
            return receiver
        step, holder, block = self._pulls[receiver].pop()
        request = (now_s, step, receiver, block)
        if holder == STORE or self._has[holder] >> block & 1:
            heapq.heappush(self._asking[holder], request)
        else:
            self._waiting[holder, block].append(request)
        return holder

    def _finish(self, flow: _Flow, now_s: float) -> set[int]:
        """Ends a transfer; the nodes that may be able to send now."""
        self._sending.discard(flow.sender)
        self._has[flow.receiver] |= 1 << flow.block
        self._arrivals[flow.receiver][flow.block] = now_s
        for request in self._waiting.pop((flow.receiver, flow.block), ()):
            heapq.heappush(self._asking[flow.receiver], request)
        for shared in flow.shares:
            self._flows[shared].remove(flow)
        self._share(flow.shares, now_s)
        return {flow.sender, flow.receiver, self._ask(flow.receiver, now_s)}

    def _start(self, able: set[int], now_s: float) -> None:
        for sender in able:
            asking = self._asking[sender]
            while asking and sender not in self._sending:
                _, _, receiver, block = heapq.heappop(asking)
                if sender != STORE:
                    self._sending.add(sender)
                rate = self._links.rate(sender, receiver)
                size_bytes = self._block_bytes[block] + self._links.overhead_s * rate
                shares = self._links.shared(sender, receiver)
                flow = _Flow(sender, receiver, block, size_bytes, rate, rate, now_s, shares)
                for shared in shares:
                    self._flows[shared].append(flow)
                self._expect(flow, now_s)
                self._share(shares, now_s)

    def _share(self, shares: tuple[Hashable, ...], now_s: float) -> None:
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
