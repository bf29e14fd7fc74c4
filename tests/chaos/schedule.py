"""Schedule of faults: what is broken when and for how long, from a seed. Pure.

Every kind of fault hits every target that it has once, in an order of the seed's, before any comes again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

GATEWAYS = ("gateway-0", "gateway-1")
NODES = ("node-0", "node-1")
CONTROL, STORE, REDIS, WORKER = "control", "store", "redis", "worker"
STEPS = ("gateway-0", "gateway-1", "node-0", "node-1")

LASTS_S = {
    "kill": 1.0,
    "stop": 6.0,
    "part": 5.0,
    "cut": 4.5,
    "lose packets": 6.0,
    "slow link": 6.0,
    "maxmemory": 5.0,
    "readonly": 5.0,
    "full disk": 5.0,
    "descriptors": 5.0,
    "clock forward": 5.0,
    "clock back": 5.0,
}
"""Length of each kind, beyond the leases: a leader's is 2 s, a node's and a gateway's 3 s."""
LONG_STOP_S = 13.0
"""Of a gateway: longer than the 10 s after which its claims on idempotency keys are taken."""
PAUSE_S = (1.0, 3.0)
"""Between the end of a fault and the next: at times the system has not recovered by then."""
BOTH_SHARE = 0.25
"""Share of faults during which another one begins."""


@dataclass(frozen=True, slots=True)
class Planned:
    at_s: float
    kind: str
    targets: tuple[str, ...]
    lasts_s: float


def every_fault() -> list[tuple[str, tuple[str, ...]]]:
    """(kind, targets) of all faults that there are."""
    parts = (*GATEWAYS, *NODES)
    found: list[tuple[str, tuple[str, ...]]] = [("kill", (name,)) for name in (*parts, REDIS, WORKER)]
    found += [("stop", (name,)) for name in (*parts, REDIS, STORE)]
    found += [("part", pair) for pair in combinations((*parts, CONTROL, STORE), 2) if pair != (CONTROL, STORE)]
    found += [(kind, (host,)) for kind in ("cut", "lose packets", "slow link") for host in (*parts, CONTROL)]
    found += [("maxmemory", (REDIS,)), ("readonly", (REDIS,))]
    found += [(kind, (name,)) for kind in ("full disk", "descriptors") for name in (*parts, REDIS)]
    found += [(kind, (name,)) for kind in ("clock forward", "clock back") for name in STEPS]
    return found


def plan(seed: int, length_s: float, *, scale: float = 1.0, kinds: Sequence[str] = ()) -> list[Planned]:
    """Faults until `length_s`, by their begin; all have ended by then. `scale`: of their lengths and pauses. `kinds`:
    only these, if there are any."""
    chance = random.Random(seed)
    found: list[Planned] = []
    at_s = chance.uniform(*PAUSE_S) * scale
    for kind, targets in _shuffled_again_and_again(chance, kinds):
        long = kind == "stop" and targets[0] in GATEWAYS
        lasts_s = (LONG_STOP_S if long else LASTS_S[kind]) * scale * chance.uniform(0.7, 1.2)
        if at_s + lasts_s > length_s:
            return found
        found.append(Planned(round(at_s, 3), kind, targets, round(lasts_s, 3)))
        beside = chance.random() < BOTH_SHARE
        at_s += lasts_s * 0.5 if beside else lasts_s + chance.uniform(*PAUSE_S) * scale
    return found


def _shuffled_again_and_again(chance: random.Random, kinds: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Round robin over the kinds, so that also a short run has most of them."""
    while True:
        left = {kind: [one for one in every_fault() if one[0] == kind] for kind in kinds or LASTS_S}
        for faults in left.values():
            chance.shuffle(faults)
        while any(left.values()):
            order = [kind for kind, faults in left.items() if faults]
            chance.shuffle(order)
            for kind in order:
                yield left[kind].pop()
