"""A function's own limits, as they hold at one of several gateways: calls a second with a burst, and calls at a time.

The rate is a token bucket (`contract.process.token_bucket`). Gateways do not talk about each call: each of n takes an
n-th of the limits.
"""

from __future__ import annotations

from math import ceil

from fleetstart.runtime.contract.function.spec import Limits

NO_LIMITS = Limits()


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
