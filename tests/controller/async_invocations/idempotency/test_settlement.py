"""Responses that are stored after they were sent, as Redis did not answer, whoever has the key meanwhile."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import redis.exceptions

from fleetstart.controller.async_invocations.idempotency.response_recorder import ResponseRecorder
from fleetstart.controller.async_invocations.idempotency.settlement import ClaimSettlement
from fleetstart.controller.async_invocations.idempotency.store import (
    CallPlace,
    CallPlaces,
    IdempotencyKeys,
    KeyClaim,
    digest_of,
    new_claim,
    taken_over,
)
from fleetstart.controller.http.asgi import Message
from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.storage.folder_store import FolderStore
from fleetstart.runtime.contract.ids import InvocationId, Version, WorkerId


class FailingOnce(IdempotencyKeys):
    """Keys whose first response is not stored."""

    failed = False

    async def settle(self, digest: str, raw: bytes, claim: KeyClaim, body: bytes) -> None:
        if not self.failed:
            self.failed = True
            raise redis.exceptions.TimeoutError("Timeout reading, after 2 s")
        await super().settle(digest, raw, claim, body)


async def _answered(status: int) -> ResponseRecorder:
    async def send(_: Message) -> None:
        pass

    async def on_end() -> None:
        pass

    recorder = ResponseRecorder(send, 1000, on_end)
    await recorder({"type": "http.response.start", "status": status, "headers": [(b"fs-start", b"hot")]})
    await recorder({"type": "http.response.body", "body": b"mine"})
    return recorder


@pytest.mark.parametrize("goes_on", [True, False], ids=["goes on with it", "runs again"])
def test_who_goes_on_with_a_call_leaves_its_answer_to_whoever_has_it(
    redis_url: str, tmp_path: Path, goes_on: bool
) -> None:
    """The worker that keeps the answer can be lost before the other gateway has read it: the call would run again."""

    async def scenario() -> None:
        client = connect(redis_url)
        claims, places = FailingOnce(client, FolderStore(tmp_path)), CallPlaces(client)
        digest = digest_of("ml", "k1")
        claim, raw, left_ms, _ = await claims.take(digest, new_claim("f", InvocationId("inv-1")))
        settlement = ClaimSettlement(claims, places)
        await settlement.settle(await _answered(200), digest, claim, raw)
        place = CallPlace(fingerprint="f", invocation=claim.invocation, version=Version(1), worker=WorkerId("w-1"))
        wanted = taken_over(new_claim("f", InvocationId("inv-2")), claim, place if goes_on else None)
        other, others_raw, *_ = await claims.take(digest, wanted, raw, left_ms)
        assert other.owner == wanted.owner
        ends_s = time.monotonic() + 20
        while settlement._unsettled:
            assert time.monotonic() < ends_s, "the response is still tried to be stored"
            await asyncio.sleep(0.02)
        found = await claims.read(digest)
        assert found is not None
        if goes_on:
            answer = await claims.answer(digest, found[0])
            assert answer is not None
            assert answer[1] == b"mine"
            await claims.free(digest, others_raw)  # as of the other gateway, which finds no worker
            assert await claims.read(digest) == found
        else:
            assert found == (other, others_raw)
        await client.aclose()

    asyncio.run(scenario())
