"""Delivers webhooks: what they say of an invocation that has ended, under the secret of its project."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec
import redis.asyncio as redis

from fleetstart.controller.invocations import lifecycle, webhooks
from fleetstart.controller.invocations.book import Book, Entry
from fleetstart.controller.invocations.posting import Poster
from fleetstart.controller.invocations.resources import InvocationInfo
from fleetstart.runtime.contract import keys

log = logging.getLogger(__name__)

SYSTEM = "system"
"""The project of calls that belong to none."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a webhook."""

    type: str
    """ "invocation.succeeded", and so on for each way to end."""
    timestamp: str
    data: InvocationInfo


class Courier:
    def __init__(
        self, client: redis.Redis, book: Book, poster: Poster, info: Callable[[Entry], Awaitable[InvocationInfo]]
    ) -> None:
        self._client = client
        self._book = book
        self._poster = poster
        self._info = info

    async def close(self) -> None:
        await self._poster.close()

    async def secret(self, project: str) -> str:
        """Of the project; made when it is first asked for."""
        field = project or SYSTEM
        await self._client.hsetnx(keys.WEBHOOK_SECRETS, field, webhooks.new_secret())
        raw = await cast(Awaitable[bytes], self._client.hget(keys.WEBHOOK_SECRETS, field))
        return raw.decode()

    async def rotate(self, project: str) -> str:
        """Another secret, from the next delivery on."""
        secret = webhooks.new_secret()
        await self._client.hset(keys.WEBHOOK_SECRETS, project or SYSTEM, secret)
        return secret

    async def deliver(self, entry: Entry) -> None:
        """One try; what came of it is in the book afterwards."""
        now_unix_ms = time.time_ns() // 1_000_000
        claimed = await self._book.write(entry, lifecycle.delivering(entry.progress, now_unix_ms))
        if claimed is None:
            return
        envelope = entry.envelope
        body = msgspec.json.encode(
            Message(
                type=f"invocation.{entry.progress.status}",
                timestamp=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.progress.finished_unix_ms / 1000)),
                data=await self._info(entry),
            )
        )
        secret = await self.secret(envelope.project)
        headers = webhooks.headers(secret, envelope.id, int(time.time()), body)
        status, error = await self._poster.post(envelope.webhook, headers, body)
        now_unix_ms = time.time_ns() // 1_000_000
        after = lifecycle.delivered(claimed.progress, now_unix_ms, http_status=status, error=error)
        await self._book.write(claimed, after, tell=after.status)
        if error:
            log.warning(
                "a webhook was not taken",
                extra={"invocation": envelope.id, "error": error, "tries": claimed.progress.delivery.tries}
                if claimed.progress.delivery
                else {},
            )
