"""Async calls with a key: accepted once, however long the store takes, and whichever gateway accepts them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis.asyncio as redis

from fleetstart.controller.async_invocations.idempotency.middleware import IdempotentCall
from fleetstart.controller.async_invocations.idempotency.silence import RUNNING_MS
from fleetstart.controller.async_invocations.idempotency.store import (
    CallPlace,
    CallPlaces,
    IdempotencyKeys,
    KeyClaim,
    digest_of,
    taken_over,
)
from fleetstart.controller.async_invocations.store.invocations import InvocationStore
from fleetstart.controller.async_invocations.store.payloads import PayloadStore
from fleetstart.controller.async_invocations.store.redis_clock import RedisClock
from fleetstart.controller.async_invocations.submit import AsyncSubmitter
from fleetstart.controller.storage.folder_store import FolderStore
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import InvocationId, Version, WorkerId
from tests.controller.async_invocations.test_stepped_clocks import allowed, envelope, now_ms


class SlowStore(FolderStore):
    """A store whose next write waits until it is let go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked, self.let_go = asyncio.Event(), asyncio.Event()

    async def create(self, key: str, data: bytes) -> bool:
        if not self.asked.is_set():
            self.asked.set()
            await self.let_go.wait()
        return await super().create(key, data)


class Gateway:
    """The part of a gateway that accepts async calls with a key."""

    def __init__(self, client: redis.Redis, store: FolderStore) -> None:
        self.told: list[InvocationId] = []
        self._submitter = AsyncSubmitter(InvocationStore(client), PayloadStore(store), allowed, RedisClock(client))
        self._idempotent = IdempotentCall("gw", _never, IdempotencyKeys(client, store), CallPlaces(client))

    async def accept(self, invocation: InvocationId) -> InvocationId:
        call = msgspec.structs.replace(envelope(1, now_ms()), id=invocation, fingerprint="same")
        return (await self._submitter.accept(call, b"")).id

    async def post(self, request_id: str) -> None:
        async def answer(invocation: InvocationId, *, replayed: bool) -> bool:
            self.told.append(invocation)
            return True

        await self._idempotent.accept(
            "default", "key", "same", InvocationId(request_id), accept=self.accept, answer=answer, send=_never
        )


async def _never(*_: Any) -> None:
    raise AssertionError("nothing runs here")


def test_the_claim_is_renewed_while_the_store_takes_its_time(redis_url: str, tmp_path: Path) -> None:
    """A repetition of the call took the key after 10 s: two invocations, two bills."""

    async def run() -> None:
        async with redis.from_url(redis_url) as client:
            store = SlowStore(tmp_path)
            gateway, claim = Gateway(client, store), keys.idempotency(digest_of("default", "key"))
            first = asyncio.create_task(gateway.post("inv-1"))
            await store.asked.wait()
            await client.pexpire(claim, RUNNING_MS - 9_000)  # as if it had been so for 9 s
            async with asyncio.timeout(10):
                while await client.pttl(claim) < RUNNING_MS - 1_000:
                    await asyncio.sleep(0.02)
            store.let_go.set()
            await first
            await gateway.post("inv-2")
            assert gateway.told == ["inv-1", "inv-1"]
            assert await client.zrange(keys.INVOCATIONS_INDEX, 0, -1) == [b"inv-1"]

    asyncio.run(run())


def test_two_gateways_that_accept_one_call_store_it_once(redis_url: str, tmp_path: Path) -> None:
    """A gateway stops while it accepted the call, and goes on when another one has taken the key and accepted it."""

    async def run() -> None:
        async with redis.from_url(redis_url) as client:
            store = SlowStore(tmp_path)
            gateway = Gateway(client, store)
            stood_still = asyncio.create_task(gateway.post("inv-1"))
            await store.asked.wait()
            read = await IdempotencyKeys(client, store).read(digest_of("default", "key"))
            assert read is not None
            ours = KeyClaim(fingerprint="same", owner="other", invocation=InvocationId("inv-2"), accepts=True)
            assert await gateway.accept(taken_over(ours, read[0], None).invocation) == "inv-1"
            store.let_go.set()
            await stood_still
            assert gateway.told == ["inv-1"]
            assert await client.zrange(keys.INVOCATIONS_INDEX, 0, -1) == [b"inv-1"]

    asyncio.run(run())


PLACE = CallPlace(
    fingerprint="same", invocation=InvocationId("inv-0"), version=Version(1), worker=WorkerId("w"), gateway="gw"
)


@pytest.mark.parametrize(
    ("accepts", "accepted", "place", "invocation"),
    [
        (True, True, None, "inv-1"),  # the same call, stored once
        (True, False, None, "inv-2"),  # it ran at the silent gateway, under an id that is taken
        (False, True, None, "inv-2"),
        (False, False, None, "inv-2"),
        (False, False, PLACE, "inv-0"),  # it goes on at its worker
    ],
)
def test_the_id_of_a_call_that_takes_a_key_over(
    accepts: bool, accepted: bool, place: CallPlace | None, invocation: str
) -> None:
    ours = KeyClaim(fingerprint="same", owner="b", invocation=InvocationId("inv-2"), accepts=accepts)
    standing = KeyClaim(fingerprint="same", owner="a", invocation=InvocationId("inv-1"), accepts=accepted)
    taken = taken_over(ours, standing, place)
    assert (taken.owner, taken.invocation, taken.retaken) == ("b", invocation, True)
