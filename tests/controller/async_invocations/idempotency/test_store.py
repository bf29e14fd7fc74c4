"""Answers of idempotent calls in Redis: bounded in bytes, the rest in the object store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from fleetstart.controller.async_invocations.idempotency import store
from fleetstart.controller.async_invocations.idempotency.store import IdempotencyKeys, digest_of, new_claim
from fleetstart.controller.state.invocation_records import Answer
from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.storage.folder_store import FolderStore
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import InvocationId


def test_answers_beyond_the_bytes_of_an_hour_are_in_the_store_and_as_good(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "INLINE_HOUR_BYTES", 20_000)

    async def scenario() -> None:
        client, objects = connect(redis_url), FolderStore(tmp_path)
        claims = IdempotencyKeys(client, objects)
        in_redis = 0
        for number in range(20):
            digest = digest_of("ml", str(number))
            claim, raw, *_ = await claims.take(digest, new_claim("f", InvocationId(f"inv-{number}")))
            # Long headers count as well: the twentieth has them, and hardly a body.
            headers = [("x-own", "h" * (20_000 if number == 19 else 500))]
            body = b"b" * 1_500
            answer = Answer(claim=1, http_status=200, headers=headers, body_bytes=len(body))
            done = msgspec.structs.replace(claim, state="done", answer=answer)
            await claims.settle(digest, raw, done, body)
            in_redis += int(await client.strlen(keys.idempotency(digest)))
            found = await claims.read(digest)
            assert found is not None
            assert await claims.answer(digest, found[0]) == (answer, body)
        assert in_redis < 20_000 + 20 * 500
        assert len(await objects.list("idempotency/")) >= 10
        await client.aclose()

    asyncio.run(scenario())
