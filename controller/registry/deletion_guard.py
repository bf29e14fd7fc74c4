"""Deletion guard: a mark in Redis excludes a deploy and a removal of the same object of the store at a time.

The race: a deploy finds what it needs in the store, a removal finds that it is unused, and both go on. So a removal
first writes a mark and only then looks for uses; a deploy reads the mark before it looks into the store, and its last
step, in one script with the record that it writes, fails if the mark has changed. Either order is detected.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Sequence
from typing import cast

import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import Unavailable

STALE_MS = 10 * 60_000
"""Age after which a removal mark is ignored: its controller has died."""
FORGET_MS = 24 * 3_600_000
"""Age after which a mark is deleted: no deploy lasts so long."""


class DeletionGuard:
    """Reads and writes the marks. Errors: REDIS_ERRORS."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    async def marks(self, needed: Sequence[str], now_unix_ms: int) -> list[str]:
        """Reads the marks that a deploy passes to its script. Errors: Unavailable while one is being removed."""
        if not needed:
            return []
        raw = await cast(Awaitable[list[bytes | None]], self._client.hmget(keys.REMOVALS, list(needed)))
        marks = [(value or b"").decode() for value in raw]
        for digest, mark in zip(needed, marks, strict=True):
            state, since_unix_ms = _parsed(mark)
            if state == "removing" and now_unix_ms - since_unix_ms < STALE_MS:
                raise Unavailable(
                    f"{digest[:12]} is being removed from the store",
                    hint="deploy again when that is done; it is uploaded again",
                    retry_after_s=1,
                )
        return marks

    async def begin(self, digest: str, now_unix_ms: int) -> str:
        """Marks a removal: deploys that looked before will fail. Returns the token for `end`."""
        await self._forget_old(now_unix_ms)
        token = f"{now_unix_ms}:{secrets.token_hex(8)}"
        await self._client.hset(keys.REMOVALS, digest, f"removing:{token}")
        return token

    async def end(self, digest: str, token: str) -> None:
        """Ends the removal. The mark of another removal of the same object, still going on, stays."""
        current = await cast(Awaitable[bytes | None], self._client.hget(keys.REMOVALS, digest))
        if current == f"removing:{token}".encode():
            await self._client.hset(keys.REMOVALS, digest, f"removed:{token}")

    async def _forget_old(self, now_unix_ms: int) -> None:
        marks = await cast(Awaitable[dict[bytes, bytes]], self._client.hgetall(keys.REMOVALS))
        old = [key for key, mark in marks.items() if now_unix_ms - _parsed(mark.decode())[1] > FORGET_MS]
        if old:
            await self._client.hdel(keys.REMOVALS, *[key.decode() for key in old])


def _parsed(mark: str) -> tuple[str, int]:
    state, _, rest = mark.partition(":")
    text = rest.partition(":")[0]
    return state, int(text) if text.isdecimal() else 0
