"""Sizes of the launcher's pools of containers, by demand, and when what failed is tried again. Pure.

A container goes through three states before it has a worker: *created* (a folder and a record of the engine, no
process), *paused* (its Python has imported a profile, and its processes are frozen), and handed out. From the first a
worker takes some 300 ms, from the second some 30. A paused one holds the memory of its imports, so as many are kept as
were taken in the busiest moment of the last minutes; a created one costs the disk some kilobytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

REMEMBERED_S = 300.0
"""Demand that is older is forgotten, and the containers kept for it are removed."""
REFILL_S = 2.0
"""Time in which one that was taken is replaced, on a busy machine: those taken within it must be there already."""
PAUSED_MOST = 4
"""Most paused containers of one pool: with torch each holds some 150 MB."""
CREATED_LEAST, CREATED_MOST = 1, 8
SETTLE_S = 0.5
"""Pause after the last launch before pools are refilled: it would take a core from the start that is under way."""


FAILURE_PAUSES_S = (2.0, 5.0, 15.0, 30.0)
"""Pauses after failures in a row of one pool, or of one container's removal: the engine may be starting again, and an
image that is gone from it may never come back."""


class PoolKey(NamedTuple):
    """What the containers of one pool have in common."""

    profile: str
    image: str = ""
    """Id of a user's image; empty: the generic one."""


@dataclass(frozen=True, slots=True)
class PoolTargets:
    """How many containers the launcher keeps ready."""

    created: int
    """Of the generic image: all pools of it take from them."""
    paused: Mapping[PoolKey, int]


class Backoff:
    """Pauses of what failed and waits to be tried again: pools by their key, containers to be removed by their id."""

    def __init__(self) -> None:
        self._failed: dict[PoolKey | str, tuple[int, float]] = {}
        """Failures in a row, and the time of the last."""

    def failed(self, what: PoolKey | str, now_s: float) -> None:
        failures, _ = self._failed.get(what, (0, 0.0))
        self._failed[what] = failures + 1, now_s

    def succeeded(self, what: PoolKey | str) -> None:
        self._failed.pop(what, None)

    def may_try(self, what: PoolKey | str, now_s: float) -> bool:
        failures, failed_s = self._failed.get(what, (0, 0.0))
        return not failures or now_s - failed_s >= FAILURE_PAUSES_S[min(failures, len(FAILURE_PAUSES_S)) - 1]


def busiest(launches_s: Sequence[float], now_s: float) -> int:
    """The most launches within REFILL_S of each other that are remembered."""
    recent = sorted(at for at in launches_s if now_s - at <= REMEMBERED_S)
    most = first = 0
    for index, at in enumerate(recent):
        while at - recent[first] > REFILL_S:
            first += 1
        most = max(most, index - first + 1)
    return most


def targets(launches_s: Mapping[PoolKey, Sequence[float]], now_s: float) -> PoolTargets:
    """What to keep ready, by the times of the launches of each pool."""
    peaks = {pool: busiest(times, now_s) for pool, times in launches_s.items()}
    paused = {pool: min(PAUSED_MOST, peak) for pool, peak in peaks.items() if peak}
    generic = sum(peak for pool, peak in peaks.items() if not pool.image)
    return PoolTargets(min(CREATED_MOST, max(CREATED_LEAST, generic)), paused)


def may_refill(launches_s: Mapping[PoolKey, Sequence[float]], now_s: float) -> bool:
    """True once no launch is so recent that its worker still starts."""
    return all(now_s - max(times, default=-SETTLE_S) >= SETTLE_S for times in launches_s.values())
