"""Objects of the store that nothing needs, and since when: noted in a hash of Redis by the first look that finds them
unneeded, and forgotten as soon as they are needed again or gone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Iterable, Mapping
from typing import TypeVar, cast

import redis.asyncio as redis

Name = TypeVar("Name", bound=str)


class UnusedObjects:
    """Tells which objects have been unused for longer than `stay_ms`. Errors: REDIS_ERRORS."""

    def __init__(self, client: redis.Redis, key: str, stay_ms: int) -> None:
        """`key`: the hash, name → unix ms since which it is unused."""
        self._client = client
        self._key = key
        self._stay_ms = stay_ms

    async def look(self, there: Collection[Name], used: Collection[Name], now_unix_ms: int) -> list[Name]:
        """Notes what of the objects is unused since now, and returns those that have been for long enough."""
        raw = await cast(Awaitable[dict[bytes, bytes]], self._client.hgetall(self._key))
        known = {cast(Name, name.decode()): int(since) for name, since in raw.items()}
        fresh, forgotten, outdated = changes(there, used, known, now_unix_ms, self._stay_ms)
        if fresh:
            await self._client.hset(self._key, mapping=dict.fromkeys(fresh, str(now_unix_ms)))
        await self.forget(forgotten)
        return outdated

    async def forget(self, names: Iterable[str]) -> None:
        """Forgets objects that were removed: the next of their names begin anew."""
        if gone := list(names):
            await self._client.hdel(self._key, *gone)


def changes(
    there: Collection[Name],
    used: Collection[Name],
    unused_since_ms: Mapping[Name, int],
    now_unix_ms: int,
    stay_ms: int,
) -> tuple[list[Name], list[Name], list[Name]]:
    """Objects that are unused since now; noted ones that are used again or gone; and those to remove."""
    unused = set(there) - set(used)
    fresh = sorted(unused - unused_since_ms.keys())
    forgotten = sorted(unused_since_ms.keys() - unused)
    outdated = sorted(name for name in unused & unused_since_ms.keys() if now_unix_ms - unused_since_ms[name] > stay_ms)
    return fresh, forgotten, outdated
