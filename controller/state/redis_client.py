"""The Redis client: connection, Lua scripts, and the errors that mean that Redis is unavailable."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError

from fleetstart.runtime.contract.errors import Unavailable

REDIS_ERRORS = (RedisError, OSError, asyncio.TimeoutError)
"""Errors of a Redis that is unavailable: callers retry, or answer 503."""


def unavailable(error: Exception, consequence: str) -> Unavailable:
    """The error for what a Redis that fails with one of `REDIS_ERRORS` keeps from being done: one that answers may
    refuse to write. `consequence` ends the sentence."""
    hint = ""
    match error:
        case OutOfMemoryError():
            what, hint = "Redis is full, and refuses to write", "raise its `maxmemory`; `fs status` shows what fills it"
        case ReadOnlyError():
            what, hint = "Redis is a replica, and refuses to write", "name the primary in FS_REDIS_URL"
        case ResponseError():
            what = f"Redis refuses ({str(error)[:120]})"
        case _:
            what = "Redis does not answer"
    return Unavailable(f"{what}, {consequence}", hint=hint, retry_after_s=1)


POOL_WAIT_S = 2.0
"""How long a command waits for a free connection of its pool: as long as for the server's answer."""
CONNECTIONS = 32
"""Connections of a pool: with commands of less than a millisecond, tens of thousands a second."""


def connect(url: str, *, purpose: str = "", connections: int = CONNECTIONS) -> redis.Redis:
    """A client with connections of its own, for which commands wait when all are in use.

    One immediate retry, for a connection that broke while idle; more would only make callers wait. `purpose` is the
    connections' name in CLIENT LIST.
    """
    pool: redis.BlockingConnectionPool = redis.BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=POOL_WAIT_S,
        socket_timeout=2.0,
        socket_connect_timeout=2.0,
        retry=Retry(NoBackoff(), 1),
        retry_on_error=[redis.ConnectionError],
        client_name=f"fleetstart-{purpose}" if purpose else None,
    )
    return redis.Redis.from_pool(pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisClients:
    """The clients of a controller: work that must not wait for other work has connections of its own.

    Together they may have 114 connections; Redis' `maxclients` is 10,000 unless its operator sets it.
    """

    leases: redis.Redis
    """Leases of the gateway and the scheduler, and the scheduler's writes."""
    view: redis.Redis
    """Reads of the view, and its publications."""
    ledger: redis.Redis
    """Rows, openings, prices and budgets."""
    calls: redis.Redis
    """Async and idempotent calls, and what people ask for."""
    followers: redis.Redis
    """The shared blocking reader of streams that are followed."""

    async def aclose(self) -> None:
        for client in (self.leases, self.view, self.ledger, self.calls, self.followers):
            await client.aclose()


def connect_all(url: str) -> RedisClients:
    return RedisClients(
        leases=connect(url, purpose="leases", connections=8),
        view=connect(url, purpose="view", connections=8),
        ledger=connect(url, purpose="ledger", connections=32),
        calls=connect(url, purpose="calls", connections=64),
        followers=connect(url, purpose="followers", connections=2),
    )


@cache
def script_text(name: str) -> str:
    """The text of a Lua script of the controller's. A process reads each once: a controller has seventeen."""
    return files("fleetstart.controller").joinpath("state", "lua", f"{name}.lua").read_text()


class Script:
    """A Lua script, loaded on first use and again after Redis was restarted."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        self._client = client
        self._text = script_text(name)
        self._sha = ""

    async def load(self) -> str:
        """Loads the script; returns its digest, for pipelines."""
        self._sha = await self._client.script_load(self._text)
        return self._sha

    async def __call__(self, script_keys: list[str], args: list[str | bytes | int]) -> Any:
        if not self._sha:
            await self.load()
        try:
            return await self._client.evalsha(self._sha, len(script_keys), *script_keys, *args)
        except NoScriptError:
            self._sha = ""
            return await self(script_keys, args)
