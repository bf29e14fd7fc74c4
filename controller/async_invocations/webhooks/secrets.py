"""Signing secrets of webhooks: one a project, in Redis, encrypted (`auth.secret_encryption`).

A secret in plain text, as older versions stored it, is read as it is and encrypted by the next `reencrypt_all`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import cast

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import Unavailable

from ...auth.secret_encryption import SecretCipher, SecretCipherError
from ...state.access_records import SecretRecord
from ...state.redis_client import Script
from . import signing

NAME = "webhook-secret"
"""Name that the ciphertext is bound to, beside its project: no secret of a function can have it."""
TRIES = 20


class WebhookSecrets:
    """Reads, creates and rotates webhook secrets. Errors: REDIS_ERRORS; SecretCipherError without the master key."""

    def __init__(self, client: redis.Redis, cipher: SecretCipher) -> None:
        self._client = client
        self._cipher = cipher
        self._swap = Script(client, "compare_and_set")
        self._decoder = msgspec.json.Decoder(SecretRecord)

    async def get(self, project: str) -> str:
        """The project's secret, created on first use. Errors: SecretCipherError if another master key encrypted it."""
        for _ in range(TRIES):
            raw = await self._raw(project)
            if _is_encrypted(raw):
                return self._decrypted(raw)
            secret = raw.decode() or signing.new_secret()
            if await self._write(project, raw, secret):
                return secret
        raise _conflict(project)

    async def rotate(self, project: str) -> str:
        """Replaces the secret, from the next delivery on."""
        for _ in range(TRIES):
            secret = signing.new_secret()
            if await self._write(project, await self._raw(project), secret):
                return secret
        raise _conflict(project)

    async def reencrypt_all(self) -> int:
        """Encrypts all secrets with the current master key; returns their number."""
        fields = await cast(Awaitable[list[bytes]], self._client.hkeys(keys.WEBHOOK_SECRETS))
        for project in (field.decode() for field in fields):
            await self._reencrypt(project)
        return len(fields)

    async def masters(self) -> set[str]:
        """Ids of the master keys that encrypted them."""
        raw = await cast(Awaitable[list[bytes]], self._client.hvals(keys.WEBHOOK_SECRETS))
        return {self._decoder.decode(one).master for one in raw if _is_encrypted(one)}

    async def forget(self, project: str) -> None:
        await self._client.hdel(keys.WEBHOOK_SECRETS, project)

    async def _reencrypt(self, project: str) -> None:
        for _ in range(TRIES):
            raw = await self._raw(project)
            secret = self._decrypted(raw) if _is_encrypted(raw) else raw.decode()
            if not secret or await self._write(project, raw, secret):
                return
        raise _conflict(project)

    async def _raw(self, project: str) -> bytes:
        return await cast(Awaitable[bytes | None], self._client.hget(keys.WEBHOOK_SECRETS, project)) or b""

    def _decrypted(self, raw: bytes) -> str:
        try:
            return self._cipher.decrypt(self._decoder.decode(raw))
        except (SecretCipherError, *UNDECODABLE) as error:
            why = error.message if isinstance(error, SecretCipherError) else error
            raise SecretCipherError(
                f"the webhook secret cannot be read: {why}",
                hint="give the controller the master key that encrypted it, or rotate it: fs webhooks secret --rotate",
            ) from error

    async def _write(self, project: str, before: bytes, secret: str) -> bool:
        """Writes the secret; False if it was changed concurrently, or its master key was."""
        box, master = self._cipher.encrypt(project, NAME, secret)
        now_unix_ms = time.time_ns() // 1_000_000
        record = SecretRecord(
            name=NAME, project=project, box=box, master=master, size_bytes=len(secret), created_unix_ms=now_unix_ms,
            updated_unix_ms=now_unix_ms, updated_by="",
        )  # fmt: skip
        arguments: list[str | bytes | int] = [project, before, msgspec.json.encode(record), keys.EVENTS_INVOCATIONS]
        return bool(await self._swap([keys.WEBHOOK_SECRETS], arguments)) and self._cipher.knows(master)


def _is_encrypted(raw: bytes) -> bool:
    return raw.startswith(b"{")


def _conflict(project: str) -> Unavailable:
    return Unavailable(f"the webhook secret of {project}: too many concurrent changes", retry_after_s=1)
