"""Tests of gateways whose own clock is an hour off: accepted calls run at once, and nothing is deleted early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis.asyncio as redis
from starlette.requests import Request
from starlette.responses import Response

from fleetstart.controller.api.invocations import InvocationsApi
from fleetstart.controller.async_invocations.idempotency.store import IdempotencyKeys
from fleetstart.controller.async_invocations.presenter import InvocationPresenter
from fleetstart.controller.async_invocations.retention import RetentionSweeper
from fleetstart.controller.async_invocations.store import lifecycle
from fleetstart.controller.async_invocations.store.invocations import InvocationStore, StoredInvocation
from fleetstart.controller.async_invocations.store.lifecycle import RunOutcome
from fleetstart.controller.async_invocations.store.payloads import PayloadStore
from fleetstart.controller.async_invocations.store.redis_clock import RedisClock
from fleetstart.controller.async_invocations.submit import AsyncSubmitter
from fleetstart.controller.async_invocations.webhooks.delivery import WebhookDelivery
from fleetstart.controller.auth.secret_encryption import SecretCipherError
from fleetstart.controller.state.invocation_records import Envelope, Progress
from fleetstart.controller.storage.folder_store import FolderStore
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version

HOUR_MS = 3_600_000
LATE_MS = 60_000
"""More than a busy machine takes, and less than the step."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def envelope(number: int, accepted_unix_ms: int) -> Envelope:
    return Envelope(
        id=InvocationId(f"call-{number}"), function=FunctionName("hello"), method="POST", target="/fn/hello",
        headers=[], body_bytes=0, fingerprint=str(number), accepted_unix_ms=accepted_unix_ms, queue_s=3600, ttl_s=600,
    )  # fmt: skip


async def allowed(*_: Any) -> Version:
    """Admission, which lets everything pass."""
    return Version(1)


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS])
def test_a_call_is_due_at_once_and_waits_its_whole_time(redis_url: str, tmp_path: Path, step_ms: int) -> None:
    async def accept() -> None:
        async with redis.from_url(redis_url) as client:
            invocations, payloads = InvocationStore(client), PayloadStore(FolderStore(tmp_path))
            submitter = AsyncSubmitter(invocations, payloads, allowed, RedisClock(client))
            kept = await submitter.accept(envelope(1, now_ms() + step_ms), b"")
            entry = await invocations.get(kept.id)
            assert entry is not None
            assert abs(entry.progress.due_unix_ms - now_ms()) < LATE_MS
            assert abs(entry.progress.queue_until_unix_ms - now_ms() - HOUR_MS) < LATE_MS
            assert lifecycle.next_step(entry.progress, now_ms() + LATE_MS) == "claim"
            restored = await payloads.request(kept.id)
            assert restored is not None
            assert abs(restored[0].accepted_unix_ms - now_ms()) < LATE_MS, "also if Redis loses it"

    asyncio.run(accept())


class ClockOfRedis(RedisClock):
    """Redis' clock, which is a step away from this machine's."""

    step_ms = 0

    def now_unix_ms(self) -> int:
        return super().now_unix_ms() + self.step_ms


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS])
def test_what_people_change_is_due_by_the_clock_that_runners_read(redis_url: str, step_ms: int) -> None:
    """A redriven call ran an hour late, or expired at once."""

    async def change() -> None:
        async with redis.from_url(redis_url) as client:
            invocations, clock = InvocationStore(client), ClockOfRedis(client)
            clock.step_ms = step_ms
            none: Any = None
            presenter = InvocationPresenter("http://x", none, none)
            api = InvocationsApi(invocations, none, presenter, none, none, none, none, none, clock, none)
            kept = msgspec.structs.replace(envelope(1, clock.now_unix_ms()), webhook="http://127.0.0.1:1/")
            await invocations.create(kept, lifecycle.accepted(kept))
            request = Request({"type": "http", "path_params": {"id": kept.id}})

            async def after(made: Awaitable[Response]) -> Progress:
                await made
                return (await invocations.require(kept.id)).progress

            cancelled = await after(api.cancel(request))
            redelivered = await after(api.redeliver(request))
            redriven = await after(api.redrive(request))
            assert redelivered.delivery is not None
            times = (cancelled.finished_unix_ms, redelivered.delivery.next_unix_ms, redriven.due_unix_ms)
            assert all(abs(at_unix_ms - clock.now_unix_ms()) < LATE_MS for at_unix_ms in times)

    asyncio.run(change())


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS])
def test_a_webhook_that_failed_is_tried_again_in_time(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_ms: int
) -> None:
    class Closed:
        """A vault without its key, so that no attempt succeeds."""

        async def get(self, project: str) -> bytes:
            raise SecretCipherError("closed")

    async def info(entry: StoredInvocation) -> dict[str, str]:
        return {}

    async def deliver() -> None:
        async with redis.from_url(redis_url) as client:
            invocations = InvocationStore(client)
            kept = msgspec.structs.replace(envelope(1, now_ms()), webhook="http://127.0.0.1:1/")
            ended = lifecycle.ended(lifecycle.accepted(kept), kept, RunOutcome(), now_ms())
            await invocations.create(kept, ended)
            entry = await invocations.get(kept.id)
            assert entry is not None
            nothing: Any = None
            closed: Any = Closed()
            said: Any = info
            off = time.time_ns() + step_ms * 1_000_000
            monkeypatch.setattr("time.time_ns", lambda: off)
            await WebhookDelivery(invocations, nothing, closed, said, RedisClock(client)).deliver(entry)
            monkeypatch.undo()
            after = await invocations.get(kept.id)
            assert after is not None
            assert after.progress.delivery is not None
            assert 0 < after.progress.delivery.next_unix_ms - now_ms() < LATE_MS

    asyncio.run(deliver())


def test_an_answer_is_not_deleted_by_a_scheduler_whose_clock_is_ahead(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sweep() -> None:
        async with redis.from_url(redis_url) as client:
            invocations, payloads = InvocationStore(client), PayloadStore(FolderStore(tmp_path))
            claims = IdempotencyKeys(client, FolderStore(tmp_path))
            kept = envelope(1, now_ms())
            ended = lifecycle.ended(lifecycle.accepted(kept), kept, RunOutcome(), now_ms())
            await invocations.create(kept, ended)
            ahead = time.time_ns() + HOUR_MS * 1_000_000
            monkeypatch.setattr("time.time_ns", lambda: ahead)
            await RetentionSweeper(client, invocations, payloads, claims, lambda: 1).look()
            monkeypatch.undo()
            assert await invocations.get(kept.id) is not None

    asyncio.run(sweep())
