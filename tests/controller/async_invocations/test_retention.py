"""Retention keeps up with calls however slow the object store is: many are deleted at a time."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import redis.asyncio as redis

from fleetstart.controller.async_invocations.idempotency.store import IdempotencyKeys
from fleetstart.controller.async_invocations.retention import DELETES, RetentionSweeper
from fleetstart.controller.async_invocations.store import lifecycle
from fleetstart.controller.async_invocations.store.invocations import InvocationStore
from fleetstart.controller.async_invocations.store.lifecycle import RunOutcome
from fleetstart.controller.async_invocations.store.payloads import PayloadStore
from fleetstart.controller.state.invocation_records import Envelope
from fleetstart.controller.storage.folder_store import FolderStore
from fleetstart.controller.storage.object_store import StoredObject
from fleetstart.runtime.contract.ids import FunctionName, InvocationId


class SlowStore(FolderStore):
    """Answers when as many ask as may at a time."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._asking = 0
        self._enough = asyncio.Event()

    async def list(self, prefix: str) -> list[StoredObject]:
        self._asking += 1
        if self._asking == DELETES:
            self._enough.set()
        await self._enough.wait()
        return await super().list(prefix)


def test_expired_calls_are_deleted_many_at_a_time(redis_url: str, tmp_path: Path) -> None:
    async def sweep() -> None:
        store = SlowStore(tmp_path)
        async with redis.from_url(redis_url) as client:
            invocations = InvocationStore(client)
            now_unix_ms = time.time_ns() // 1_000_000
            for number in range(3 * DELETES):
                call = Envelope(
                    id=InvocationId(f"call-{number}"), function=FunctionName("hello"), method="POST",
                    target="/fn/hello", headers=[], body_bytes=0, fingerprint="", accepted_unix_ms=now_unix_ms,
                    queue_s=3600, ttl_s=60,
                )  # fmt: skip
                await invocations.create(
                    call, lifecycle.ended(lifecycle.accepted(call), call, RunOutcome(), now_unix_ms)
                )
            sweeper = RetentionSweeper(
                client, invocations, PayloadStore(store), IdempotencyKeys(client, store), lambda: 1
            )
            async with asyncio.timeout(30):
                assert await sweeper.sweep(now_unix_ms + 3_600_000) == 3 * DELETES
            assert not [call async for call in invocations.newest(100)]

    asyncio.run(sweep())
