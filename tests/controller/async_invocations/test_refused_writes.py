"""Test of async calls while Redis refuses writes, as a replica does: they wait, and turn in no circle."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest
import redis.asyncio as redis

from fleetstart.controller.async_invocations import runner as runners
from fleetstart.controller.async_invocations.runner import InvocationRunner
from fleetstart.controller.async_invocations.store.invocations import InvocationStore
from fleetstart.controller.async_invocations.store.payloads import PayloadStore
from fleetstart.controller.async_invocations.store.redis_clock import RedisClock
from fleetstart.controller.async_invocations.submit import AsyncSubmitter
from fleetstart.controller.state.view import View
from fleetstart.controller.storage.folder_store import FolderStore
from tests.controller.async_invocations.test_stepped_clocks import allowed, envelope

TRIES = 4


def test_a_call_whose_claim_is_refused_is_tried_again_after_a_pause(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def refused() -> list[float]:
        async with redis.from_url(redis_url) as client:
            invocations, payloads = InvocationStore(client), PayloadStore(FolderStore(tmp_path))
            submitter = AsyncSubmitter(invocations, payloads, allowed, RedisClock(client))
            await submitter.accept(envelope(1, time.time_ns() // 1_000_000), b"")
            none = cast(Any, None)
            runner = InvocationRunner("gw", client, View(), invocations, payloads, none, none, trace=none)
            await client.config_set("min-replicas-to-write", 1)
            running = asyncio.create_task(runner.run())
            try:
                async with asyncio.timeout(20):
                    while len(times := waiting(caplog)) < TRIES:
                        await asyncio.sleep(0.01)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                await client.config_set("min-replicas-to-write", 0)
            return times

    times = asyncio.run(refused())
    assert times[TRIES - 1] - times[0] >= (TRIES - 1) * runners.RETRY_S * 0.9


def waiting(caplog: pytest.LogCaptureFixture) -> list[float]:
    """Times at which a call waited for Redis."""
    return [record.created for record in caplog.records if record.message == "an invocation waits for redis"]
