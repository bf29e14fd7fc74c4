"""The share of a function's limits that one of several gateways enforces: calls a second with a burst, calls at a time.

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
    """Limits of the `place`-th (from 0) of so many gateways.

    The remainder goes to the first ones; burst and calls at a time are one at least, or a gateway would reject all.
    """
    if gateways <= 1:
        return limits
    return Limits(
        rate=limits.rate / gateways,
        burst=_share_of(burst_of(limits), gateways, place) if limits.rate else 0,
        concurrent=_share_of(limits.concurrent, gateways, place) if limits.concurrent else 0,
    )


def _share_of(whole: int, parts: int, place: int) -> int:
    return max(1, whole // parts + (place < whole % parts))
