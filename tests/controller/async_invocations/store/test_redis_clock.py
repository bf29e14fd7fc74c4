"""Leases by one clock, and takeovers only of what stands still: with clocks that a test sets."""

from __future__ import annotations

import asyncio
from typing import Any

from fleetstart.controller.async_invocations.store import lifecycle
from fleetstart.controller.async_invocations.store.redis_clock import RedisClock, UnchangedFor
from fleetstart.controller.state.invocation_records import Progress
from fleetstart.runtime.contract.ids import InvocationId

SECOND = 1_000_000_000
HOUR_MS = 3_600_000


class Clocks:
    """Redis' clock, and a gateway's two."""

    def __init__(self) -> None:
        self.redis_ns = 1_700_000_000 * SECOND
        self.monotonic_ns = 5 * SECOND
        self.unix_ns = self.redis_ns
        self.asked = 0

    async def time(self) -> tuple[int, int]:
        self.asked += 1
        return self.redis_ns // SECOND, self.redis_ns % SECOND // 1000

    def advance(self, seconds: float) -> None:
        self.redis_ns += round(seconds * SECOND)
        self.monotonic_ns += round(seconds * SECOND)
        self.unix_ns += round(seconds * SECOND)

    def gateway(self) -> RedisClock:
        client: Any = self
        return RedisClock(client, lambda: self.monotonic_ns, lambda: self.unix_ns)


def test_a_gateway_whose_own_clock_steps_reads_the_same_time() -> None:
    clocks = Clocks()
    one = clocks.gateway()
    assert one.now_unix_ms() == clocks.unix_ns // 1_000_000, "until Redis was asked"
    asyncio.run(one.refresh())
    clocks.unix_ns -= 3600 * SECOND
    clocks.advance(0.5)
    asyncio.run(one.refresh())
    assert clocks.asked == 1, "not for each look"
    assert one.now_unix_ms() == clocks.redis_ns // 1_000_000
    clocks.advance(5)
    asyncio.run(one.refresh())
    assert one.now_unix_ms() == clocks.redis_ns // 1_000_000


def test_a_lease_that_is_renewed_is_not_taken_though_all_clocks_step() -> None:
    """Redis' clock jumps an hour ahead: every lease has expired, and the living renew theirs once a second."""
    clocks = Clocks()
    gateway, unchanged = clocks.gateway(), UnchangedFor(lambda: clocks.monotonic_ns)
    asyncio.run(gateway.refresh())
    alive = lifecycle.claimed(Progress(), "gw-1", gateway.now_unix_ms())
    dead = lifecycle.claimed(Progress(), "gw-2", gateway.now_unix_ms())
    clocks.redis_ns += 3600 * SECOND
    clocks.advance(1.1)
    asyncio.run(gateway.refresh())
    taken = set()
    for tenth in range(40):
        now_ms = gateway.now_unix_ms()
        if tenth % 10 == 0:
            alive = lifecycle.renewed(alive, now_ms - HOUR_MS)  # a holder that has not seen the step
        for name, progress in (("alive", alive), ("dead", dead)):
            assert lifecycle.next_step(progress, now_ms) == "claim"
            raw = str(progress).encode()
            if unchanged.ms(InvocationId(name), raw) >= lifecycle.UNCHANGED_MS:
                taken.add(name)
        clocks.advance(0.1)
    assert taken == {"dead"}
