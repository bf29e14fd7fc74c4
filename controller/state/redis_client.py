"""The Redis client: connection, Lua scripts, and the errors that mean that Redis is unavailable."""

from __future__ import annotations

import asyncio
from importlib.resources import files
from typing import Any

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

REDIS_ERRORS = (RedisError, OSError, asyncio.TimeoutError)
"""Errors of a Redis that is unavailable: callers retry, or answer 503."""


def connect(url: str) -> redis.Redis:
    """Connects with one immediate retry, for a connection that broke while idle; more would only make callers wait."""
    return redis.Redis.from_url(
        url,
        socket_timeout=2.0,
        socket_connect_timeout=2.0,
        retry=Retry(NoBackoff(), 1),
        retry_on_error=[redis.ConnectionError],
    )


class Script:
    """A Lua script, loaded on first use and again after Redis was restarted."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        self._client = client
        self._text = files("fleetstart.controller").joinpath("state", "lua", f"{name}.lua").read_text()
        self._sha = ""

    async def __call__(self, script_keys: list[str], args: list[str | bytes | int]) -> Any:
        if not self._sha:
            self._sha = await self._client.script_load(self._text)
        try:
            return await self._client.evalsha(self._sha, len(script_keys), *script_keys, *args)
        except NoScriptError:
            self._sha = ""
            return await self(script_keys, args)
