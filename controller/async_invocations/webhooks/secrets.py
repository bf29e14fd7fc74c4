"""Signing secrets of webhooks: one a project, in Redis, encrypted (`auth.secret_encryption`).

After a rotation the secret before signs beside the new one for a grace period: a receiver takes a delivery if one of
its signatures is good, and is changed while deliveries go on. A secret in plain text, as older versions stored it, is
read as it is and encrypted by the next `reencrypt_all`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from dataclasses import dataclass
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
OLD_MAX = 4
"""Secrets before the current one that still sign: each makes the header of a delivery longer."""
TRIES = 20


class OldSecret(msgspec.Struct, frozen=True, kw_only=True):
    """A secret that was rotated and still signs."""

    box: str
    master: str
    until_unix_ms: int


class WebhookSecretRecord(SecretRecord, frozen=True, kw_only=True):
    old: tuple[OldSecret, ...] = ()
    """Those before it, the newest first."""


@dataclass(frozen=True, slots=True)
class SigningSecrets:
    current: str
    old: tuple[tuple[str, int], ...] = ()
    """Secrets that sign beside it, the newest first, and until when each does (unix ms)."""

    def at(self, now_unix_ms: int) -> list[str]:
        """The secrets that sign now, the current one first."""
        return [self.current, *(secret for secret, until_unix_ms in self.old if now_unix_ms < until_unix_ms)]


class WebhookSecrets:
    """Reads, creates and rotates webhook secrets. Errors: REDIS_ERRORS; SecretCipherError without the master key."""

    def __init__(self, client: redis.Redis, cipher: SecretCipher) -> None:
        self._client = client
        self._cipher = cipher
        self._swap = Script(client, "compare_and_set")
        self._decoder = msgspec.json.Decoder(WebhookSecretRecord)

    async def get(self, project: str) -> SigningSecrets:
        """The project's secrets, created on first use. Errors: SecretCipherError if another master key encrypted the
        current one."""
        for _ in range(TRIES):
            raw = await self._raw(project)
            if _is_encrypted(raw):
                return self._decrypted(raw)
            secrets = SigningSecrets(raw.decode() or signing.new_secret())
            if await self._write(project, raw, secrets):
                return secrets
        raise _conflict(project)

    async def rotate(self, project: str, grace_s: float) -> SigningSecrets:
        """Replaces the secret, from the next delivery on. The ones before sign for `grace_s` more; with 0 none does."""
        for _ in range(TRIES):
            raw = await self._raw(project)
            rotated = _rotated(self._known(raw), round(grace_s * 1000), time.time_ns() // 1_000_000)
            if await self._write(project, raw, rotated):
                return rotated
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
        records = [self._decoder.decode(one) for one in raw if _is_encrypted(one)]
        return {master for record in records for master in (record.master, *(one.master for one in record.old))}

    async def forget(self, project: str) -> None:
        await self._client.hdel(keys.WEBHOOK_SECRETS, project)

    async def _reencrypt(self, project: str) -> None:
        for _ in range(TRIES):
            raw = await self._raw(project)
            secrets = self._decrypted(raw) if _is_encrypted(raw) else SigningSecrets(raw.decode())
            if not secrets.current or await self._write(project, raw, secrets):
                return
        raise _conflict(project)

    async def _raw(self, project: str) -> bytes:
        return await cast(Awaitable[bytes | None], self._client.hget(keys.WEBHOOK_SECRETS, project)) or b""

    def _known(self, raw: bytes) -> SigningSecrets | None:
        """The stored secrets; None if there are none, or if they cannot be read, which a rotation is to mend."""
        if not _is_encrypted(raw):
            return SigningSecrets(raw.decode()) if raw else None
        try:
            return self._decrypted(raw)
        except SecretCipherError:
            return None

    def _decrypted(self, raw: bytes) -> SigningSecrets:
        try:
            record = self._decoder.decode(raw)
            current = self._cipher.decrypt(record)
        except (SecretCipherError, *UNDECODABLE) as error:
            why = error.message if isinstance(error, SecretCipherError) else error
            raise SecretCipherError(
                f"the webhook secret cannot be read: {why}",
                hint="give the controller the master key that encrypted it, or rotate it: fs webhooks secret --rotate",
            ) from error
        old: list[tuple[str, int]] = []
        for one in record.old:
            try:
                secret = self._cipher.decrypt(msgspec.structs.replace(record, box=one.box, master=one.master))
            except SecretCipherError:
                continue  # the current one signs
            old.append((secret, one.until_unix_ms))
        return SigningSecrets(current, tuple(old))

    async def _write(self, project: str, before: bytes, secrets: SigningSecrets) -> bool:
        """Writes the secrets; False if they were changed concurrently, or their master key was."""
        box, master = self._cipher.encrypt(project, NAME, secrets.current)
        now_unix_ms = time.time_ns() // 1_000_000
        record = WebhookSecretRecord(
            name=NAME, project=project, box=box, master=master, size_bytes=len(secrets.current),
            created_unix_ms=now_unix_ms, updated_unix_ms=now_unix_ms, updated_by="",
            old=tuple(self._old(project, *one) for one in secrets.old),
        )  # fmt: skip
        arguments: list[str | bytes | int] = [project, before, msgspec.json.encode(record), keys.EVENTS_INVOCATIONS]
        return bool(await self._swap([keys.WEBHOOK_SECRETS], arguments)) and self._cipher.knows(master)

    def _old(self, project: str, secret: str, until_unix_ms: int) -> OldSecret:
        box, master = self._cipher.encrypt(project, NAME, secret)
        return OldSecret(box=box, master=master, until_unix_ms=until_unix_ms)


def _rotated(known: SigningSecrets | None, grace_ms: int, now_unix_ms: int) -> SigningSecrets:
    """The secrets after a rotation: none of those before signs for longer than the grace period."""
    until_unix_ms = now_unix_ms + grace_ms
    before = [(known.current, until_unix_ms), *known.old] if known is not None else []
    old = [(secret, min(until, until_unix_ms)) for secret, until in before if min(until, until_unix_ms) > now_unix_ms]
    return SigningSecrets(signing.new_secret(), tuple(old[:OLD_MAX]))


def _is_encrypted(raw: bytes) -> bool:
    return raw.startswith(b"{")


def _conflict(project: str) -> Unavailable:
    return Unavailable(f"the webhook secret of {project}: too many concurrent changes", retry_after_s=1)
