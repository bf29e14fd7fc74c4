"""The store of async invocations in a real Redis: searches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
import redis.asyncio as redis

from fleetstart.controller.async_invocations.store import invocations as module
from fleetstart.controller.async_invocations.store import lifecycle
from fleetstart.controller.async_invocations.store.invocations import InvocationStore
from fleetstart.controller.async_invocations.store.lifecycle import RunOutcome
from fleetstart.controller.state.invocation_records import Answer, Envelope
from fleetstart.runtime.contract.ids import FunctionName, InvocationId

BEGUN = 1_000_000


def envelope(name: str, function: str, at_unix_ms: int) -> Envelope:
    return Envelope(
        id=InvocationId(name), function=FunctionName(function), method="POST", target=f"/fn/{function}",
        headers=[("x-quoted", '"function":"other","status":"failed","dead":true')], body_bytes=0, fingerprint="",
        accepted_unix_ms=at_unix_ms, queue_s=60, ttl_s=60,
    )  # fmt: skip


def test_a_search_finds_what_fits_behind_any_number_of_others(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looked at the newest 10,000 of all functions: a function's own were not found behind those of a busy one."""
    monkeypatch.setattr(module, "SEARCHED_AT_ONCE", 7)

    async def scenario() -> None:
        async with redis.from_url(redis_url) as client:
            store = InvocationStore(client)
            rare = envelope("rare", "a.ml.rare", BEGUN)
            dead = msgspec.structs.replace(lifecycle.accepted(rare), dead=True, status="failed")
            plain = envelope("plain", "plain", BEGUN + 1)
            assert await store.create(rare, dead)
            assert await store.create(plain, lifecycle.accepted(plain))
            for number in range(50):
                call = envelope(f"many-{number:02}", "many", BEGUN + 2 + number)
                outcome = RunOutcome(answer=Answer(claim=1, http_status=200, headers=call.headers, body_bytes=0))
                running = lifecycle.claimed(lifecycle.accepted(call), "gw", BEGUN)
                assert await store.create(call, lifecycle.ended(running, call, outcome, BEGUN))

            async def found(functions: Sequence[str] = (), **terms: str | bool) -> list[str]:
                entries = store.find(3, functions=functions, **terms)  # type: ignore[arg-type]
                return [entry.envelope.id async for entry in entries]

            many = [f"many-{number:02}" for number in reversed(range(50))]
            assert await found() == [*many, "plain", "rare"]
            assert await found(["a.ml.rare"]) == await found(dead=True) == await found(status="failed") == ["rare"]
            assert await found(project="a.ml") == await found(["a.ml.rare", "plain"], project="a.ml") == ["rare"]
            assert await found(["plain"]) == await found(status="queued") == ["plain"]
            assert await found(project="default") == [*many, "plain"]
            assert await found(["other"]) == await found(["many"], dead=True) == []

    asyncio.run(scenario())


def test_a_search_names_none_twice_while_new_ones_come(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEARCHED_AT_ONCE", 2)

    async def scenario() -> None:
        async with redis.from_url(redis_url) as client:
            store = InvocationStore(client)

            async def add(number: int) -> None:
                call = envelope(f"call-{number:02}", "f", BEGUN + number)
                assert await store.create(call, lifecycle.accepted(call))

            for number in range(10):
                await add(number)
            found = list[str]()
            async for entry in store.find(2):
                found.append(entry.envelope.id)
                await add(10 + len(found))
            assert found == [f"call-{number:02}" for number in reversed(range(10))]

    asyncio.run(scenario())
