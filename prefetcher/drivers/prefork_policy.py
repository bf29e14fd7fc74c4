"""How many forked, waiting workers a node keeps: decided from plain values.

A pooled worker takes the fork, the namespaces and the attachment to its control groups out of the cold
start. Making one costs a core for up to 60 ms (torch), so none is made while a start is under way, nor while
the started worker serves the call for which it was started: on two cores the spare would delay that answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SETTLE_S = 0.5
"""After the last start ended: its first answer has begun by then, and a burst of orders is one start."""
FAILURE_PAUSES_S = (0.5, 2.0, 10.0, 30.0)
"""After spares that died unasked, one after the other: a machine that cannot fork is not helped by trying harder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """What there is of one pool: the workers of one profile and isolation."""

    warm: bool
    waiting: int
    forking: int
    failures: int = 0
    """Spares in a row that died before they were used."""
    failed_at_s: float = 0.0


def choose_pool(
    pools: Mapping[str, PoolState], *, size: int, starts_under_way: int, last_start_s: float, now_s: float
) -> str | None:
    """The pool to fork one spare worker for now, if any: one at a time, the emptiest pool first."""
    if starts_under_way or now_s - last_start_s < SETTLE_S or any(pool.forking for pool in pools.values()):
        return None
    short = [
        (pool.waiting, name)
        for name, pool in pools.items()
        if pool.warm and pool.waiting < size and now_s >= pool.failed_at_s + pause_s(pool.failures)
    ]
    return min(short)[1] if short else None


def is_unsandboxed(pool: str) -> bool:
    """Whether a spare is kept before anybody has asked for one: a fork shares nearly all of its memory, a sandbox that
    nobody needs costs a hundred megabytes."""
    return "+" not in pool


def pause_s(failures: int) -> float:
    return 0.0 if failures == 0 else FAILURE_PAUSES_S[min(failures, len(FAILURE_PAUSES_S)) - 1]
