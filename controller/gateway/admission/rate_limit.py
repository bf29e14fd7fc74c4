"""A function's own limits, as they hold at one of several gateways: calls a second with a burst, and calls at a time.

Pure: values and `now` in, a wait out. The rate is a leaky bucket kept as one number, the time at which the next call
would be due if all came evenly (GCRA, ITU-T I.371): calls may be ahead of it by a burst. Gateways do not talk about
each call: each of n takes an n-th of the limits.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from fleetstart.runtime.contract.function.spec import Limits

NO_LIMITS = Limits()
TOLERANCE = 1e-3
"""Of the time between two calls, so much too early is in time: the clock is rounded at each call of a burst, and the
more so the longer the machine has run."""


class RateDecision(NamedTuple):
    due_s: float
    """When the call after this one is due; as before if this one may not come."""
    wait_s: float
    """Until it may; 0 if it may now."""


def try_acquire(due_s: float, limits: Limits, now_s: float) -> RateDecision:
    """One call that comes now, of a function with a rate."""
    every_s = 1 / limits.rate
    ahead_s = (burst_of(limits) - 1) * every_s
    start_s = max(due_s, now_s)
    wait_s = start_s - now_s - ahead_s
    if wait_s > TOLERANCE * every_s:
        return RateDecision(due_s, wait_s)
    return RateDecision(start_s + every_s, 0.0)


def burst_of(limits: Limits) -> int:
    return limits.burst or max(1, ceil(limits.rate))


def gateway_share(limits: Limits, gateways: int, place: int) -> Limits:
    """Of one of so many gateways, the `place`-th (from 0) of them. What does not divide goes to the first ones; a burst
    and calls at a time are one at least, or a gateway could never let anybody in."""
    if gateways <= 1:
        return limits
    return Limits(
        rate=limits.rate / gateways,
        burst=_share_of(burst_of(limits), gateways, place) if limits.rate else 0,
        concurrent=_share_of(limits.concurrent, gateways, place) if limits.concurrent else 0,
    )


def _share_of(whole: int, parts: int, place: int) -> int:
    return max(1, whole // parts + (place < whole % parts))
