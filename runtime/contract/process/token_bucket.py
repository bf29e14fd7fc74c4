"""The token bucket: a rate limit with a burst. Pure: time is given, none is read.

The bucket is kept as one number, the time at which the next token would be due if all came evenly (GCRA, ITU-T I.371):
takers may be ahead of it by a burst. So the rate may change between two calls, and a bucket that was never used needs
no entry.
"""

from __future__ import annotations

from typing import NamedTuple

TOLERANCE = 1e-3
"""Share of the interval between two tokens by which a taker may be early: the clock is a float, which is rounded at
each call of a burst, and the more so the longer the machine has run."""
NEVER_S = 60.0
"""The wait for a token of a bucket that gets none: its rate may be changed meanwhile."""


class TokenDecision(NamedTuple):
    """Answer of a token bucket: whether a token was taken, and the bucket afterwards."""

    due_s: float
    """When the next token is due; unchanged if none was taken."""
    wait_s: float
    """Time until a token can be taken; 0 if one was taken now."""


def take_token(due_s: float, *, per_s: float, burst: float, now_s: float, count: int = 1) -> TokenDecision:
    """Takes a token of a bucket that refills at `per_s` and holds `burst`, at least one. `due_s` 0 is a full bucket.

    `count`: so many, if there is one; the rest is owed.
    """
    if per_s <= 0:
        return TokenDecision(due_s, NEVER_S)
    every_s = 1 / per_s
    start_s = max(due_s, now_s)
    wait_s = start_s - now_s - (max(1.0, burst) - 1) * every_s
    if wait_s > TOLERANCE * every_s:
        return TokenDecision(due_s, wait_s)
    return TokenDecision(start_s + count * every_s, 0.0)


class TokenBucket:
    """A bucket of a fixed rate that counts what it refuses. One owner, no threads."""

    def __init__(self, *, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._due_s = 0.0
        self._refused = 0

    def try_take(self, now_s: float, count: int = 1) -> bool:
        """Takes so many tokens if there is one; those that are missing are owed."""
        self._due_s, wait_s = take_token(self._due_s, per_s=self._per_s, burst=self._burst, now_s=now_s, count=count)
        self._refused += wait_s > 0
        return wait_s == 0

    def pop_refused(self) -> int:
        """Returns the number of refused takers since the last call of this."""
        refused, self._refused = self._refused, 0
        return refused
