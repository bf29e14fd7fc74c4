"""Errors of Redis as callers read them: one that answers may refuse to write."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio as redis

from fleetstart.controller.state.redis_client import REDIS_ERRORS, Script, unavailable

REFUSALS = [
    ({"maxmemory": 1}, "Redis is full, and refuses to write, so it waits"),
    ({"min-replicas-to-write": 1}, "Redis refuses (NOREPLICAS"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSALS)
def test_a_redis_that_refuses_a_write_is_not_said_to_be_away(
    settings: dict[str, int], message: str, redis_url: str
) -> None:
    async def refused() -> str:
        async with redis.from_url(redis_url) as client:
            before = {name: (await client.config_get(name))[name] for name in settings}
            for name, value in settings.items():
                await client.config_set(name, value)
            try:
                await Script(client, "compare_and_set")(["h"], ["field", "", "value", "channel"])
            except REDIS_ERRORS as error:
                return unavailable(error, "so it waits").message
            finally:
                for name, old in before.items():
                    await client.config_set(name, old or "")
        return ""

    assert asyncio.run(refused()).startswith(message)


def test_one_that_is_away_is_said_not_to_answer() -> None:
    assert unavailable(ConnectionRefusedError(), "so it waits").message == "Redis does not answer, so it waits"
