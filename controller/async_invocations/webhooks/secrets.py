"""The secrets that webhooks are signed with: one a project, in Redis as other secrets are, encrypted (`access.vault`).

One that lies there in clear, as they did once, is taken as it is and encrypted when it is first asked for.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import cast

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import Unavailable

from ...auth.secret_encryption import SecretCipher, SecretCipherError
from ...state.access_records import SecretRecord
from ...state.redis_client import Script
from . import signing as webhooks

NAME = "webhook-secret"
"""What the vault binds them to, beside their project: no secret of a function's may have that name."""
TRIES = 20


class WebhookSecrets:
    """Errors of all methods: REDIS_ERRORS, and SecretCipherError where the master key cannot be had."""

    def __init__(self, client: redis.Redis, vault: SecretCipher) -> None:
        self._client = client
        self._vault = vault
        self._swap = Script(client, "compare_and_set")
        self._decoder = msgspec.json.Decoder(SecretRecord)

    async def get(self, project: str) -> str:
        """The project's secret, created on first use. Errors: SecretCipherError if another master key encrypted it."""
        for _ in range(TRIES):
            raw = await self._raw(project)
            if _is_closed(raw):
                return self._opened(raw)
            secret = raw.decode() or webhooks.new_secret()
            if await self._write(project, raw, secret):
                return secret
        raise _unsteady(project)

    async def rotate(self, project: str) -> str:
        """Another one from the next delivery on, whatever there was."""
        for _ in range(TRIES):
            secret = webhooks.new_secret()
            if await self._write(project, await self._raw(project), secret):
                return secret
        raise _unsteady(project)

    async def close_anew(self) -> int:
        """Encrypts all of them with the present master key; how many there are."""
        fields = await cast(Awaitable[list[bytes]], self._client.hkeys(keys.WEBHOOK_SECRETS))
        for project in (field.decode() for field in fields):
            await self._closed_anew(project)
        return len(fields)

    async def forget(self, project: str) -> None:
        await self._client.hdel(keys.WEBHOOK_SECRETS, project)

    async def _closed_anew(self, project: str) -> None:
        for _ in range(TRIES):
            raw = await self._raw(project)
            secret = self._opened(raw) if _is_closed(raw) else raw.decode()
            if not secret or await self._write(project, raw, secret):
                return
        raise _unsteady(project)

    async def _raw(self, project: str) -> bytes:
        return await cast(Awaitable[bytes | None], self._client.hget(keys.WEBHOOK_SECRETS, project)) or b""

    def _opened(self, raw: bytes) -> str:
        try:
            return self._vault.open(self._decoder.decode(raw))
        except (SecretCipherError, msgspec.DecodeError) as error:
            why = error.message if isinstance(error, SecretCipherError) else error
            raise SecretCipherError(
                f"the webhook secret cannot be read: {why}",
                hint="give the controller the master key that closed it, or make another: fs webhooks secret --rotate",
            ) from error

    async def _write(self, project: str, before: bytes, secret: str) -> bool:
        """False if it has changed meanwhile."""
        box, master = self._vault.close(project, NAME, secret)
        now_unix_ms = time.time_ns() // 1_000_000
        record = SecretRecord(
            name=NAME, project=project, box=box, master=master, size_bytes=len(secret), created_unix_ms=now_unix_ms,
            updated_unix_ms=now_unix_ms, updated_by="",
        )  # fmt: skip
        arguments: list[str | bytes | int] = [project, before, msgspec.json.encode(record), keys.EVENTS_INVOCATIONS]
        return bool(await self._swap([keys.WEBHOOK_SECRETS], arguments))


def _is_closed(raw: bytes) -> bool:
    return raw.startswith(b"{")


def _unsteady(project: str) -> Unavailable:
    return Unavailable(f"the webhook secret of {project}: somebody else changes it again and again", retry_after_s=1)
