"""Limits of a function: calls a second with a burst, and calls at a time. Decides Retry-After of their 429.

The rate is a token bucket (`contract.process.token_bucket`). Gateways do not agree about each call: each of n enforces
an n-th of the limits. (A project's quotas: `auth.quotas`. A full queue: `rejections`.)
"""

from __future__ import annotations

from math import ceil

from fleetstart.runtime.contract.errors import RateLimited
from fleetstart.runtime.contract.function.spec import Limits
from fleetstart.runtime.contract.ids import FunctionName
from fleetstart.runtime.contract.process.token_bucket import take_token

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


class LimitUsage:
    """Usage of one function's limits at this gateway."""

    __slots__ = ("calls", "due_s")

    def __init__(self) -> None:
        self.calls = 0
        """Under way."""
        self.due_s = 0.0

    def add_call(self, name: FunctionName, limits: Limits, *, service_s: float, now_s: float) -> None:
        """Counts a call under this gateway's share of the limits. `service_s`: mean duration of a call.

        Errors: RateLimited, with the time to wait before the next attempt (Retry-After).
        """
        if limits.concurrent and self.calls >= limits.concurrent:
            after_s = max(0.05, service_s / limits.concurrent)
            raise RateLimited(
                f"function {name}: {self.calls} calls are under way, its limit here is {limits.concurrent}; "
                f"one ends about every {after_s:.3g} s",
                hint=f"try again after Retry-After seconds, or raise it: fs scale {name} --concurrent",
                retry_after_s=after_s,
            )
        if limits.rate:
            self.due_s, wait_s = take_token(self.due_s, per_s=limits.rate, burst=burst_of(limits), now_s=now_s)
            if wait_s:
                raise RateLimited(
                    f"function {name}: its limit here is {limits.rate:g} calls a second; the next may come in "
                    f"{wait_s:.3g} s",
                    hint=f"try again after Retry-After seconds, or raise it: fs scale {name} --rate",
                    retry_after_s=wait_s,
                )
        self.calls += 1
