"""Redis' clock, which all gateways read leases by: their own clocks differ, and step.

It is asked for once in a while, and counted on by this process' monotonic clock. A lease that has expired by it is
taken over only after its record has stayed as it is for some time (`UnchangedFor`): Redis' clock may step, too.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, cast

import redis.asyncio as redis

from fleetstart.runtime.contract.ids import InvocationId

ASKED_EVERY_NS = 1_000_000_000
WATCHED_MAX = 10_000


class RedisClock:
    """Redis' time. Until it was asked for once, that of this machine."""

    def __init__(
        self,
        client: redis.Redis,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._client = client
        self._monotonic_ns = monotonic_ns
        self._unix_ns = unix_ns
        self._offset_ns: int | None = None
        self._asked_ns = 0

    async def refresh(self) -> None:
        """Asks Redis, if it was not asked lately. Errors: REDIS_ERRORS."""
        sent_ns = self._monotonic_ns()
        if self._offset_ns is not None and sent_ns - self._asked_ns < ASKED_EVERY_NS:
            return
        seconds, micros = await cast(Awaitable[Any], self._client.time())
        self._asked_ns = self._monotonic_ns()
        self._offset_ns = (int(seconds) * 1_000_000 + int(micros)) * 1000 - (sent_ns + self._asked_ns) // 2

    def now_unix_ms(self) -> int:
        if self._offset_ns is None:
            return self._unix_ns() // 1_000_000
        return (self._monotonic_ns() + self._offset_ns) // 1_000_000


class UnchangedFor:
    """Times since which records are as they are, as this process has seen them."""

    def __init__(self, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._monotonic_ns = monotonic_ns
        self._seen: OrderedDict[InvocationId, tuple[bytes, int]] = OrderedDict()

    def ms(self, invocation: InvocationId, raw: bytes) -> int:
        """Milliseconds since the record was first seen like this."""
        now_ns = self._monotonic_ns()
        known = self._seen.get(invocation)
        if known is None or known[0] != raw:
            known = self._seen[invocation] = (raw, now_ns)
            while len(self._seen) > WATCHED_MAX:
                self._seen.popitem(last=False)
        return (now_ns - known[1]) // 1_000_000

    def forget(self, invocation: InvocationId) -> None:
        self._seen.pop(invocation, None)
