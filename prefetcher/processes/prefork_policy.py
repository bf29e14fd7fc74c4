"""Prefork policy: which worker pool gets a preforked process next. Pure.

A preforked worker takes the fork, the namespaces and the attachment to its control groups out of the cold start.
Making one costs a core for up to 60 ms (torch), so none is made while a start is under way, nor while the started
worker serves its first call: on two cores the fork would delay that answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SETTLE_S = 0.5
"""Pause after the last start: its first answer has begun by then, and a burst of orders is one start."""
FAILURE_PAUSES_S = (0.5, 2.0, 10.0, 30.0)
"""Backoff after preforked processes that died in a row: a machine that cannot fork is not helped by trying harder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """State of one worker pool: the workers of one profile and isolation."""

    warm: bool
    waiting: int
    forking: int
    failures: int = 0
    """Processes in a row that died before they were used."""
    failed_at_s: float = 0.0


def choose_pool(
    pools: Mapping[str, PoolState], *, size: int, starts_under_way: int, last_start_s: float, now_s: float
) -> str | None:
    """The pool to fork one process for now, if any: one at a time, the emptiest pool first."""
    if starts_under_way or now_s - last_start_s < SETTLE_S or any(pool.forking for pool in pools.values()):
        return None
    short = [
        (pool.waiting, name)
        for name, pool in pools.items()
        if pool.warm and pool.waiting < size and now_s >= pool.failed_at_s + pause_s(pool.failures)
    ]
    return min(short)[1] if short else None


def is_unsandboxed(pool: str) -> bool:
    """True for pools that are filled before the first request: a fork shares nearly all of its memory, while an
    unused sandbox costs a hundred megabytes."""
    return "+" not in pool


def is_preloaded(pool: str) -> bool:
    """True for pools with a library beside their profile, which a node has once a function needed it."""
    return ":" in pool


def pause_s(failures: int) -> float:
    """Backoff after so many failures in a row."""
    return 0.0 if failures == 0 else FAILURE_PAUSES_S[min(failures, len(FAILURE_PAUSES_S)) - 1]
