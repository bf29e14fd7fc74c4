"""The timeline of an invocation: phases with monotonic timestamps that travel with it.

Response headers, `fs trace`, metrics and the ledger all read this record.
Monotonic clocks of two machines do not compare, so a timeline carries its own origin and is shifted
when it joins another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec

PhaseName = Literal[
    "queue",  # gateway: accepted, waiting for a slot on a worker
    "place",  # scheduler: demand seen, node chosen, order written
    "start",  # node: order seen, until the worker process runs our code (fork, namespaces, limits)
    "fetch",  # node: bytes of the checkpoint on their way into the segment
    "device",  # worker: device initialised
    "import",  # worker: libraries and the user's module
    "load",  # worker: weights bound, the handler's load()
    "execute",  # worker: the call itself
    "call",  # gateway: a call of another function that the handler made, within execute
    "respond",  # gateway: first byte of the answer until the last
    "move",  # gateway: a stream whose worker was lost, until another one goes on with it
]


SAME_MACHINE_NS = 50_000_000
"""Two processes of one machine read the same monotonic clock, but estimate its origin a few microseconds apart:
differences below this are that, and stamps are not shifted by them."""
PHASES_OF_WORKER_MAX = 64
"""Phases that are believed of a worker's own start; it has about ten. They stand in its status, in Redis."""


class Phase(msgspec.Struct, frozen=True):
    name: PhaseName
    started_ns: int
    ended_ns: int

    @property
    def duration_ms(self) -> float:
        return (self.ended_ns - self.started_ns) / 1e6


def machine_origin_ns() -> int:
    """Unix time at which this machine's monotonic clock stood at zero."""
    return time.time_ns() - time.monotonic_ns()


class Timeline(msgspec.Struct):
    """Phases in the order in which they were recorded. They may overlap."""

    origin_unix_ns: int = msgspec.field(default_factory=machine_origin_ns)
    phases: list[Phase] = msgspec.field(default_factory=list)

    def add(self, name: PhaseName, started_ns: int, ended_ns: int) -> None:
        self.phases.append(Phase(name, started_ns, ended_ns))

    @contextmanager
    def span(self, name: PhaseName) -> Iterator[None]:
        """Context manager that records a phase, also when the body raises."""
        started_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(name, started_ns, time.monotonic_ns())

    def join(self, other: Timeline) -> None:
        """Adds the phases of another timeline, shifted onto this clock."""
        shift_ns = _shift_ns(other.origin_unix_ns, self.origin_unix_ns)
        for phase in other.phases:
            self.add(phase.name, phase.started_ns + shift_ns, phase.ended_ns + shift_ns)

    def within(self, begin_ns: int, end_ns: int) -> Timeline:
        """The part that lies in a span of this machine's clock: the word of a worker, in the time that it had. The
        worker's clock may be another, as inside gVisor."""
        here = Timeline()
        shift_ns = _shift_ns(self.origin_unix_ns, here.origin_unix_ns)
        for phase in self.phases[:PHASES_OF_WORKER_MAX]:
            started_ns, ended_ns = max(phase.started_ns + shift_ns, begin_ns), min(phase.ended_ns + shift_ns, end_ns)
            if started_ns <= ended_ns:
                here.add(phase.name, started_ns, ended_ns)
        return here

    def total_ms(self, name: PhaseName) -> float:
        """Total duration of the phases of that name."""
        return sum(phase.duration_ms for phase in self.phases if phase.name == name)

    def server_timing(self) -> str:
        """The `Server-Timing` header: one entry a phase name, milliseconds, in order of first appearance."""
        totals: dict[str, float] = {}
        for phase in self.phases:
            totals[phase.name] = totals.get(phase.name, 0.0) + phase.duration_ms
        return ", ".join(f"{name};dur={duration_ms:.2f}" for name, duration_ms in totals.items())


def _shift_ns(origin_unix_ns: int, own_origin_unix_ns: int) -> int:
    """Nanoseconds that are added to a stamp of another clock to have one of one's own."""
    shift_ns = origin_unix_ns - own_origin_unix_ns
    return 0 if abs(shift_ns) < SAME_MACHINE_NS else shift_ns
