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

from ..auth.secret_encryption import SecretCipher, SecretCipherError
from ..state.access_records import KeyRecord, SecretRecord
from ..state.cas_hash import CasHash
from ..state.identity_records import AuthorityRecord, NodeIdentity, PeerKeyRecord
from ..state.sync import StateSync

if TYPE_CHECKING:  # half of what a controller imports, and most systems have one machine
    from .certificates import Authority

CURRENT = "current"
KEY_NAME = "certificate-authority"
"""Name that the encrypted key is bound to, beside no project: no secret of a function can have it."""


SAME_S = 60.0
"""Age up to which a certificate is given again: who repeats a request, seen on its way, makes nothing and learns
nothing."""


class NodeIdentities:
    """The authority and its nodes. Errors: REDIS_ERRORS, SecretCipherError."""

    def __init__(self, state: StateSync, cipher: SecretCipher) -> None:
        self._cipher = cipher
        self._authorities = CasHash(state, keys.AUTHORITY, AuthorityRecord)
        self._nodes = CasHash(state, keys.NODES_IDENTITIES, NodeIdentity)
        self._keys = CasHash(state, keys.KEYS, KeyRecord)
        self._peer_keys = CasHash(state, keys.PEER_KEYS, PeerKeyRecord)

    async def authority(self) -> Authority:
        """The authority, made at the first call."""
        from .certificates import Authority, new_authority

        record = (await self._authorities.stored()).get(CURRENT)
        if record is None:
            made = self._record(*new_authority(_now()))
            record = await self._authorities.change(CURRENT, lambda known: known or made)
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
            certificate=certificate,
        )
        await self._nodes.change(node, lambda _: record)
        return certificate, authority.certificate

    async def renew(self, node: str, request: str) -> str:
        """A certificate for a node's key that is new, or was made within the last minute; also where the last one has
        expired. A stranger's request costs a check of its signature and a read. Errors: InvalidInput, Forbidden."""
        from .certificates import LIFE, expiry_unix_ms, key_digest, requested_key

        public = requested_key(request)
        digest = key_digest(public)
        known = _held(node, await self._nodes.read(node), digest)
        if known.certificate and known.expires_unix_ms - _unix_ms() > (LIFE.total_seconds() - SAME_S) * 1000:
            return known.certificate
        authority = await self.authority()

        def renewed(known: NodeIdentity | None) -> NodeIdentity:
            held = _held(node, known, digest)
            made = authority.node_certificate(held.node, held.id, public, _now())
            return msgspec.structs.replace(held, certificate=made, expires_unix_ms=expiry_unix_ms(made))

        record = await self._nodes.change(node, renewed)
        assert record is not None
        return record.certificate

    async def remove(self, node: str) -> None:
        """Vouches for a node no longer."""
        await self._nodes.change(node, lambda _: None)

    async def reencrypt(self) -> None:
        """Encrypts the authority's key and the nodes' peer keys with the current master key."""
        await self._authorities.change(
            CURRENT,
            lambda known: known and self._record(known.certificate, self._cipher.decrypt(known.key)),
        )
        for node in await self._peer_keys.stored():
            await self._peer_keys.change(node, self._peer_key_again)

    async def masters(self) -> set[str]:
        """Ids of the master keys that the authority's key and peer keys are encrypted with."""
        sealed = [record.key for record in (await self._authorities.stored()).values()]
        sealed += [record.key for record in (await self._peer_keys.stored()).values()]
        return {one.master for one in sealed}

    def _peer_key_again(self, known: PeerKeyRecord | None) -> PeerKeyRecord | None:
        """The same key under the current master key, so that the grants which it signed stay good. One that does not
        decrypt stays as it is: the scheduler replaces it."""
        if known is None:
            return None
        try:
            box, master = self._cipher.encrypt("", known.key.name, self._cipher.decrypt(known.key))
        except SecretCipherError:
            return known
        return msgspec.structs.replace(known, key=msgspec.structs.replace(known.key, box=box, master=master))

    def _record(self, certificate: str, key: str) -> AuthorityRecord:
        box, master = self._cipher.encrypt("", KEY_NAME, key)
        now = _unix_ms()
        sealed = SecretRecord(
            name=KEY_NAME, project="", box=box, master=master, size_bytes=len(key), created_unix_ms=now,
            updated_unix_ms=now, updated_by="",
        )  # fmt: skip
        return AuthorityRecord(certificate=certificate, key=sealed)


def _held(node: str, known: NodeIdentity | None, digest: str) -> NodeIdentity:
    """The record of a node that holds this key. Errors: Forbidden."""
    if known is None or known.key_sha256 != digest:
        raise Forbidden(
            f"this key is not that of node {node[:80]}: it was removed, or another machine has its name now",
            hint="join again with a token: `fs node token` on the first machine, then fs node join URL",
        )
    return known


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000
