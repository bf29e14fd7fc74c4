"""The plan of a simulation: how large it is and what goes wrong, drawn from a seed before it begins.

Faults are a list, so that a failing run can be repeated with fewer of them. A seed's number says which generation of
plans it belongs to, so that one that has found something is the same run for ever. From `SMALL_FROM` on most worlds
are small, and from `DENSE_FROM` on smaller still: they find as much in less time, as little of it is waiting.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal[
    "kill controller", "end controller", "stop controller", "kill node", "stop node", "kill worker", "cut off",
    "part", "lose requests", "slow redis", "lose publications", "stop redis", "refuse writes", "restart redis",
    "lose the log", "step clock", "lose objects",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: Kind
    target: str
    """The process that it happens to, where it is one's."""
    for_s: float
    """How long it lasts; of a kill: until the process is started again."""
    size: float = 0.0
    """Share of requests that are lost, or seconds by which a clock steps."""

    def __str__(self) -> str:
        size = f" {self.size:.3g}" if self.size else ""
        return f"{self.at_s:7.3f} s  {self.kind} {self.target}{size} for {self.for_s:.2f} s"


@dataclass(frozen=True, slots=True)
class FunctionPlan:
    name: str
    least: int
    most: int
    concurrency: int
    keep_alive_s: float
    retries: int
    keeps: bool = False
    """True if it has weights, of which a copy is kept in memory."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How dense the work is, and what is waited for."""

    operations_per_s: float = 5.0
    operations: tuple[int, ...] = (50, 15, 20, 4, 4, 4)
    """Weights of sync, keyed and async calls, deploys, changes of scale, and revocations."""
    repeated_s: float = 8.0
    """A keyed call is repeated within so long."""
    up_s: float = 0.3
    """Time that controllers and nodes have before the first request,"""
    deployed_s: float = 1.2
    """and from the deploys to the work."""
    look_s: float = 1.0
    """Interval at which it is looked whether all has settled."""
    waits: float = 1.0
    """Factor of what clients wait between two tries of a call, and with a revoked key,"""
    revoked_tries: int = 6
    """which they try so often."""
    run_most_s: float = 4.0
    """The longest calls run for so long."""


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    controllers: int
    nodes: int
    functions: tuple[FunctionPlan, ...]
    quota: int
    """Workers that the project may have; 0: no quota."""
    chaos_s: float
    """For so long there is work, and faults."""
    failing_starts: float
    """Share of workers' starts that fail during that time."""
    faults: tuple[Fault, ...]
    pace: Pace = Pace()


WEIGHTS: dict[Kind, int] = {
    "kill controller": 4, "end controller": 2, "stop controller": 3, "kill node": 3, "stop node": 2, "kill worker": 3,
    "cut off": 4, "part": 2, "lose requests": 5, "slow redis": 3, "lose publications": 3, "stop redis": 2,
    "refuse writes": 3, "restart redis": 1, "lose the log": 1, "step clock": 3, "lose objects": 1,
}  # fmt: skip


KEEPING = 0.3
"""Share of the plans whose first function has weights."""


SMALL_FROM = 1_000_000_000
"""The first seed whose world is small."""
DENSE_FROM = 2_000_000_000
"""The first seed whose world is small and dense: shorter, with the same work."""
SMALL_WEIGHTS: dict[Kind, int] = WEIGHTS | {"restart redis": 3, "lose the log": 4, "slow redis": 2, "lose requests": 4}
"""Crashes of Redis have shown a third of all faults that were found."""
LARGE_EVERY, LARGE_EVERY_DENSE = 20, 500
"""One in so many of them is large all the same."""
LASTS: tuple[tuple[float, float], ...] = ((0.05, 1.5), (1.5, 7.0))
"""Spans of how long a fault lasts, of which one is drawn."""
SMALL = Pace(
    operations_per_s=4.0, operations=(30, 20, 20, 6, 4, 4), repeated_s=3.0, up_s=0.15, deployed_s=0.3, look_s=0.25
)
DENSE_LASTS = ((0.05, 1.2), (0.05, 1.2), (1.2, 6.5))
"""Much of a world's time passes while the last fault lasts: fewer are long, and some outlast a lease still."""
DENSE = Pace(
    operations_per_s=6.0, operations=(30, 20, 20, 6, 4, 4), repeated_s=1.2, up_s=0.1, deployed_s=0.2, look_s=0.2,
    waits=0.3, revoked_tries=3, run_most_s=2.0,
)  # fmt: skip


def plan_of(seed: int) -> Plan:
    if seed < SMALL_FROM or seed % (LARGE_EVERY if seed < DENSE_FROM else LARGE_EVERY_DENSE) == 0:
        return _large(seed)
    return _small(seed) if seed < DENSE_FROM else _dense(seed)


def _small(seed: int) -> Plan:
    chance = random.Random(f"plan {seed}")
    controllers, nodes = chance.choice((1, 2, 2, 2)), chance.choice((1, 1, 2))
    functions = _small_functions(chance, (1, 1, 1, 2), (0.5, 1.0))
    chaos_s = chance.uniform(1.0, 3.5)
    faults = [
        _fault(chance, controllers, nodes, chaos_s, 0.1, SMALL_WEIGHTS) for _ in range(chance.choice((1, 2, 3, 4)))
    ]
    return _small_plan(seed, chance, controllers, nodes, functions, chaos_s, faults, SMALL)


def _dense(seed: int) -> Plan:
    chance = random.Random(f"plan {seed}")
    controllers, nodes = chance.choice((1, 2, 2, 2)), chance.choice((1, 1, 2))
    functions = _small_functions(chance, (1, 1, 1, 1, 2), (0.3, 0.6))
    chaos_s = chance.uniform(0.8, 2.2)
    faults = [
        _fault(chance, controllers, nodes, chaos_s, 0.05, SMALL_WEIGHTS, DENSE_LASTS)
        for _ in range(chance.choice((1, 2, 2, 3)))
    ]
    return _small_plan(seed, chance, controllers, nodes, functions, chaos_s, faults, DENSE)


def _small_functions(
    chance: random.Random, counts: Sequence[int], keep_alives_s: Sequence[float]
) -> tuple[FunctionPlan, ...]:
    return tuple(
        FunctionPlan(
            name=f"f{number}",
            least=(least := chance.choice((0, 0, 1, 2))),
            most=max(least, chance.randint(1, 3)),
            concurrency=chance.choice((1, 1, 2)),
            keep_alive_s=chance.choice(keep_alives_s),
            retries=chance.choice((0, 2)),
            keeps=number == 0 and chance.random() < KEEPING / 2,
        )
        for number in range(chance.choice(counts))
    )


def _small_plan(
    seed: int,
    chance: random.Random,
    controllers: int,
    nodes: int,
    functions: tuple[FunctionPlan, ...],
    chaos_s: float,
    faults: Sequence[Fault],
    pace: Pace,
) -> Plan:
    return Plan(
        seed=seed,
        controllers=controllers,
        nodes=nodes,
        functions=functions,
        quota=chance.choice((0, 0, 0, 2)) if all(one.least <= 1 for one in functions) else 0,
        chaos_s=chaos_s,
        failing_starts=chance.choice((0.0, 0.0, 0.0, 0.1)),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        pace=pace,
    )


def _large(seed: int) -> Plan:
    chance = random.Random(f"plan {seed}")
    controllers, nodes = chance.choice((1, 2, 2, 3)), chance.choice((1, 2, 2, 3))
    functions = tuple(
        FunctionPlan(
            name=f"f{number}",
            least=(least := chance.choice((0, 0, 1, 2))),
            most=max(least, chance.randint(1, 4)),
            concurrency=chance.choice((1, 1, 2)),
            keep_alive_s=chance.choice((1.0, 3.0)),
            retries=chance.choice((0, 2)),
        )
        for number in range(chance.choice((1, 1, 2)))
    )
    if random.Random(f"weights {seed}").random() < KEEPING:
        functions = (replace(functions[0], keeps=True), *functions[1:])
    chaos_s = chance.uniform(4, 10)
    faults = [_fault(chance, controllers, nodes, chaos_s) for _ in range(chance.choice((0, 1, 2, 3, 4, 6, 8)))]
    return Plan(
        seed=seed,
        controllers=controllers,
        nodes=nodes,
        functions=functions,
        quota=chance.choice((0, 0, 3)) if all(one.least <= 1 for one in functions) else 0,
        chaos_s=chaos_s,
        failing_starts=chance.choice((0.0, 0.0, 0.1)),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
    )


def _fault(
    chance: random.Random,
    controllers: int,
    nodes: int,
    chaos_s: float,
    from_s: float = 0.5,
    weights: dict[Kind, int] = WEIGHTS,
    lasts: Sequence[tuple[float, float]] = LASTS,
) -> Fault:
    kind = chance.choices(list(weights), list(weights.values()))[0]
    controller, node = f"gw{chance.randrange(controllers)}", f"node{chance.randrange(nodes)}"
    for_s, size, target = chance.choice([chance.uniform(*span) for span in lasts]), 0.0, ""
    if "controller" in kind:
        target = controller
    elif "node" in kind:
        target = node
    elif kind in ("cut off", "step clock"):
        target = chance.choice((controller, node))
    elif kind == "part":
        target = f"{controller} {node}"
    if kind in ("lose requests", "slow redis", "lose publications", "lose objects"):
        size = chance.choice((0.02, 0.1, 0.3, 0.9))
    elif kind == "step clock":
        size = chance.choice((-1, 1)) * chance.choice((0.2, 3.0, 60.0, 5000.0))
        target = chance.choice((target, target, "redis"))
        if target == "redis":
            size = max(size, -3.0)  # by as much more the leases of the dead last: an hour is no bound to wait for
    return Fault(round(chance.uniform(from_s, chaos_s), 3), kind, target, round(for_s, 3), size)
