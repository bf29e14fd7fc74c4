"""Retention keeps up with calls however slow the object store is: many are deleted at a time."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
import redis.asyncio as redis

from fleetstart.controller.async_invocations import retention
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


def envelope(name: str, now_unix_ms: int) -> Envelope:
    return Envelope(
        id=InvocationId(name), function=FunctionName("hello"), method="POST", target="/fn/hello", headers=[],
        body_bytes=0, fingerprint="", accepted_unix_ms=now_unix_ms, queue_s=3600, ttl_s=60,
    )  # fmt: skip


def test_expired_calls_are_deleted_many_at_a_time(redis_url: str, tmp_path: Path) -> None:
    async def sweep() -> None:
        store = SlowStore(tmp_path)
        async with redis.from_url(redis_url) as client:
            invocations = InvocationStore(client)
            now_unix_ms = time.time_ns() // 1_000_000
            for number in range(3 * DELETES):
                call = envelope(f"call-{number}", now_unix_ms)
                await invocations.create(
                    call, lifecycle.ended(lifecycle.accepted(call), call, RunOutcome(), now_unix_ms)
                )
            sweeper = RetentionSweeper(
                client, invocations, PayloadStore(store), IdempotencyKeys(client, store), lambda: 1
            )
            async with asyncio.timeout(30):
                assert await sweeper.sweep(now_unix_ms + 3_600_000) == 3 * DELETES
            assert not [call async for call in invocations.find(100)]

    asyncio.run(sweep())


def test_a_call_that_redis_lost_is_restored_though_its_clock_is_behind_that_of_the_store(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By these clocks its objects are too young to be a lost call's for ever; a grace period later they are not."""
    monkeypatch.setattr(retention, "GRACE_MS", 100)

    async def scenario() -> None:
        store = FolderStore(tmp_path)
        async with redis.from_url(redis_url) as client, asyncio.timeout(30):
            invocations, payloads = InvocationStore(client), PayloadStore(store)
            call = envelope("call-1", time.time_ns() // 1_000_000)
            await payloads.keep_request(call, b"")
            ahead_s = time.time() + 60
            for path in tmp_path.rglob("*"):
                os.utime(path, (ahead_s, ahead_s))
            sweeper = RetentionSweeper(client, invocations, payloads, IdempotencyKeys(client, store), lambda: 1)
            while await invocations.get(call.id) is None:
                await sweeper.look()
                await asyncio.sleep(0.05)

    asyncio.run(scenario())
