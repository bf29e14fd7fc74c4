"""The network of a simulation: how long requests and publications take, which are lost, and who reaches whom."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.simulation.processes import Process

LATENCY_S = (0.0002, 0.003)
SLOW_S = (0.05, 1.2)
"""Latency of requests in a slow hour: around what leases can bear."""


Served = Callable[[Process, Sequence[tuple[bytes, ...]], list[Any], bool, int], None]
"""Is told what a process asked of Redis, the answers, whether they are lost, and when it asked, in nanoseconds."""


class Fate(NamedTuple):
    """What becomes of one request."""

    reaches: float | None
    """Seconds until Redis has it; None if it never does."""
    back: float | None
    """Seconds until its answer is there; None if that is lost."""
    error: float | None = None
    """Seconds until its sender gets an error instead; None: at its timeout."""
    done: int | None = None
    """How many commands of a pipeline Redis got before the connection broke; None: all."""


class Network:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.cut_off: set[str] = set()
        """Processes that do not reach Redis."""
        self.apart: set[frozenset[str]] = set()
        """Pairs of processes that do not reach each other."""
        self.loss = 0.0
        """Share of requests that are lost, or whose answer is, half of them each."""
        self.slow = 0.0
        """Share of requests that take long."""
        self.publications_lost = 0.0
        self.publications_twice = 0.0
        self.on_served: Served = lambda *_: None

    def request(self, process: Process, commands: int) -> Fate:
        chance = self._chance.random
        there_s, back_s = self._latency_s(), self._latency_s()
        if process.name in self.cut_off:
            return Fate(None, None, there_s if chance() < 0.5 else None)
        if self.loss and chance() < self.loss:
            error_s = there_s + back_s if chance() < 0.7 else None
            if chance() < 0.5:
                return Fate(None, None, error_s)
            done = int(chance() * commands) + 1 if chance() < 0.5 else None
            return Fate(there_s, None, error_s, done)
        return Fate(there_s, back_s)

    def publication(self, process: Process) -> list[float]:
        """The delays after which a publication arrives: none if it is lost, two if it comes twice."""
        if process.name in self.cut_off:
            return []
        chance = self._chance.random
        if self.publications_lost and chance() < self.publications_lost:
            return []
        delays = [self._latency_s()]
        if self.publications_twice and chance() < self.publications_twice:
            delays.append(self._latency_s())
        return delays

    def between(self, one: Process, other: Process) -> float | None:
        """Seconds that bytes take from one process to another; None if they do not arrive."""
        if self.apart and frozenset((one.name, other.name)) in self.apart:
            return None
        return self._latency_s()

    def _latency_s(self) -> float:
        chance = self._chance.random
        low, high = SLOW_S if self.slow and chance() < self.slow else LATENCY_S
        return low + (high - low) * chance()
