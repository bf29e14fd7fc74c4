"""Deletion guard: a mark in Redis excludes a deploy and a removal of the same checkpoint at the same time.

The race: a deploy finds its weights in the store, a removal finds that they are unused, and both go on. So a removal
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
from fleetstart.runtime.contract.ids import CheckpointId

STALE_MS = 10 * 60_000
"""Age after which a removal mark is ignored: its controller has died."""
FORGET_MS = 24 * 3_600_000
"""Age after which a mark is deleted: no deploy lasts so long."""


class DeletionGuard:
    """Reads and writes the marks. Errors: REDIS_ERRORS."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    async def marks(self, checkpoints: Sequence[CheckpointId], now_unix_ms: int) -> list[str]:
        """Reads the marks that a deploy passes to its script. Errors: Unavailable while one is being removed."""
        if not checkpoints:
            return []
        raw = await cast(Awaitable[list[bytes | None]], self._client.hmget(keys.REMOVALS, list(checkpoints)))
        marks = [(value or b"").decode() for value in raw]
        for checkpoint, mark in zip(checkpoints, marks, strict=True):
            state, since_unix_ms = _parsed(mark)
            if state == "removing" and now_unix_ms - since_unix_ms < STALE_MS:
                raise Unavailable(
                    f"checkpoint {checkpoint[:12]} is being removed by `fs weights rm`",
                    hint="deploy again when that is done; it uploads the weights again",
                    retry_after_s=1,
                )
        return marks

    async def begin(self, checkpoint: CheckpointId, now_unix_ms: int) -> str:
        """Marks a removal: deploys that looked before will fail. Returns the token for `end`."""
        await self._forget_old(now_unix_ms)
        token = f"{now_unix_ms}:{secrets.token_hex(8)}"
        await self._client.hset(keys.REMOVALS, checkpoint, f"removing:{token}")
        return token

    async def end(self, checkpoint: CheckpointId, token: str) -> None:
        """Ends the removal. The mark of another removal of the same checkpoint, still going on, stays."""
        current = await cast(Awaitable[bytes | None], self._client.hget(keys.REMOVALS, checkpoint))
        if current == f"removing:{token}".encode():
            await self._client.hset(keys.REMOVALS, checkpoint, f"removed:{token}")

    async def _forget_old(self, now_unix_ms: int) -> None:
        marks = await cast(Awaitable[dict[bytes, bytes]], self._client.hgetall(keys.REMOVALS))
        old = [key for key, mark in marks.items() if now_unix_ms - _parsed(mark.decode())[1] > FORGET_MS]
        if old:
            await self._client.hdel(keys.REMOVALS, *[key.decode() for key in old])


def _parsed(mark: str) -> tuple[str, int]:
    state, _, rest = mark.partition(":")
    text = rest.partition(":")[0]
    return state, int(text) if text.isdecimal() else 0
