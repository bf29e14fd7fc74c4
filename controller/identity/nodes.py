"""Nodes that the system vouches for: a node joins with a request for a certificate, has it renewed, and is removed.

The authority is made with the first node that joins. Its certificate is in Redis, and its key too, encrypted as secrets
are: Redis alone signs nothing. A node's record is what makes its certificates good: controllers expect the name that is
in the record, and a node that was removed, or has joined again, has another or none.
"""

from __future__ import annotations

import datetime
import secrets
import time
from typing import TYPE_CHECKING

import msgspec

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import Forbidden, Unavailable

from ..auth.secret_encryption import SecretCipher
from ..state.access_records import KeyRecord, SecretRecord
from ..state.cas_hash import CasHash
from ..state.identity_records import AuthorityRecord, NodeIdentity
from ..state.sync import StateSync

if TYPE_CHECKING:  # half of what a controller imports, and most systems have one machine
    from .certificates import Authority

CURRENT = "current"
KEY_NAME = "certificate-authority"
"""Name that the encrypted key is bound to, beside no project: no secret of a function can have it."""


class NodeIdentities:
    """The authority and its nodes. Errors: REDIS_ERRORS, SecretCipherError."""

    def __init__(self, state: StateSync, cipher: SecretCipher) -> None:
        self._cipher = cipher
        self._authorities = CasHash(state, keys.AUTHORITY, AuthorityRecord)
        self._nodes = CasHash(state, keys.NODES_IDENTITIES, NodeIdentity)
        self._keys = CasHash(state, keys.KEYS, KeyRecord)

    async def authority(self) -> Authority:
        """The authority, made at the first call."""
        from .certificates import Authority, new_authority

        record = await self._authorities.change(CURRENT, lambda known: known or self._record(*new_authority(_now())))
        assert record is not None
        try:
            return Authority(record.certificate, self._cipher.decrypt(record.key))
        except ValueError as error:
            raise Unavailable(f"the certificate authority in Redis is broken: {error}") from error

    async def use_token(self, token: str) -> None:
        """Ends a join token. Errors: Forbidden if another join was first."""

        def used(known: KeyRecord | None) -> KeyRecord:
            if known is None or known.revoked_unix_ms:
                raise Forbidden(f"join token {token} was used already", hint="each is for one node: fs node token")
            return msgspec.structs.replace(known, revoked_unix_ms=_unix_ms())

        await self._keys.change(token, used)

    async def join(self, node: str, request: str) -> tuple[str, str]:
        """Vouches for a node; earlier certificates of its name are void. Returns its certificate and the authority's.
        Errors: InvalidInput."""
        from .certificates import expiry_unix_ms, key_digest, requested_key

        public = requested_key(request)
        authority = await self.authority()
        id = secrets.token_hex(8)
        certificate = authority.node_certificate(node, id, public, _now())
        record = NodeIdentity(
            node=node,
            id=id,
            key_sha256=key_digest(public),
            joined_unix_ms=_unix_ms(),
            expires_unix_ms=expiry_unix_ms(certificate),
        )
        await self._nodes.change(node, lambda _: record)
        return certificate, authority.certificate

    async def renew(self, node: str, request: str) -> str:
        """A new certificate for a node's key; also where the last one has expired. Errors: InvalidInput, Forbidden."""
        from .certificates import expiry_unix_ms, key_digest, requested_key

        public = requested_key(request)
        authority = await self.authority()
        digest, made = key_digest(public), ""

        def renewed(known: NodeIdentity | None) -> NodeIdentity:
            nonlocal made
            if known is None or known.key_sha256 != digest:
                raise Forbidden(
                    f"this key is not that of node {node[:80]}: it was removed, or another machine has its name now",
                    hint="join again with a token: `fs node token` on the first machine, then fs node join URL",
                )
            made = authority.node_certificate(known.node, known.id, public, _now())
            return msgspec.structs.replace(known, expires_unix_ms=expiry_unix_ms(made))

        await self._nodes.change(node, renewed)
        return made

    async def remove(self, node: str) -> None:
        """Vouches for a node no longer."""
        await self._nodes.change(node, lambda _: None)

    async def reencrypt(self) -> None:
        """Encrypts the authority's key with the current master key."""
        await self._authorities.change(
            CURRENT,
            lambda known: known and self._record(known.certificate, self._cipher.decrypt(known.key)),
        )

    async def masters(self) -> set[str]:
        """Ids of the master keys that the authority's key is encrypted with."""
        return {record.key.master for record in (await self._authorities.stored()).values()}

    def _record(self, certificate: str, key: str) -> AuthorityRecord:
        box, master = self._cipher.encrypt("", KEY_NAME, key)
        now = _unix_ms()
        sealed = SecretRecord(
            name=KEY_NAME, project="", box=box, master=master, size_bytes=len(key), created_unix_ms=now,
            updated_unix_ms=now, updated_by="",
        )  # fmt: skip
        return AuthorityRecord(certificate=certificate, key=sealed)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000
