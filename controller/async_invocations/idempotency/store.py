"""Store of idempotency keys: the claim of the call that runs, then the response that later calls with the key get.

A key belongs to a project. Its claim is in Redis, renewed while the call runs (`silence`), and for a day with the
response: in the claim itself if that is small, else in the object store. Errors: REDIS_ERRORS.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import Literal, NamedTuple, cast

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import CLIENT_GONE, LOST_GATEWAY, InvocationTrace
from fleetstart.runtime.contract.errors import Refused
from fleetstart.runtime.contract.ids import InvocationId, Version, WorkerId
from fleetstart.runtime.contract.process.tasks import in_parallel
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord
from fleetstart.runtime.contract.sizes import MIB

from ...state.invocation_records import Answer
from ...state.redis_client import Script
from ...storage.object_store import ObjectStore
from ..store.payloads import ANSWER_MAX_BYTES, HEAD_MAX_BYTES, pack, unpack
from .silence import RUNNING_MS

KEPT_S = 86_400
INLINE_BYTES = 16 * 1024
INLINE_HOUR_BYTES = 16 * MIB
"""Bytes of responses that Redis takes in an hour, 384 MiB of a day. Others go to the object store, small ones too."""
HOUR_S = 3_600
NOT_KNOWN = Version(0)
"""First version of a function in claims of an earlier release."""
PLACE_KEPT_S = 60.0
"""How long the place of a call is kept beyond its deadline, in case that its gateway dies shortly before."""
FOLDER = "idempotency/"
DELETES = 16
"""Deletions of expired responses under way."""


class KeyMismatch(Refused):
    """The key was used for a different call."""

    code = "idempotency_mismatch"
    status = 409


class KeyBusy(Refused):
    """The first call with the key has not ended."""

    code = "idempotency_in_progress"
    status = 409
    retryable = True


class AnswerNotKept(Refused):
    """The first call with the key was answered, but its response was too large to be stored."""

    code = "idempotency_not_kept"
    status = 409


class KeyLost(Refused):
    """The gateway stood still for so long that another one took the key."""

    code = "idempotency_lost"
    status = 409
    retryable = True


class KeyClaim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    fingerprint: str
    owner: str
    """Random id of the attempt that holds the claim."""
    invocation: InvocationId
    state: Literal["running", "done", "unkept", "async"] = "running"
    answer: Answer | None = None
    body: bytes | None = None
    """Body of a small response; a larger one is in the object store."""
    retaken: bool = False
    """True if it was taken from a gateway that was silent: that one may have run the call, or some of it."""
    accepts: bool = False
    """True of an async call, which is not run under the claim but stored."""
    first: Version = NOT_KNOWN
    """First version of its function. One whose first version is later is another one of that name, for which the key
    is free."""


class Standing(NamedTuple):
    """The claim that stands, its bytes, and the milliseconds that it has left."""

    claim: KeyClaim
    raw: bytes
    left_ms: int
    refused: bool
    """True if Redis was asked to take a write, and refused it: then it refuses renewals, too."""


class CallPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a keyed call runs, for the gateway that goes on with it."""

    fingerprint: str
    invocation: InvocationId
    version: Version
    worker: WorkerId
    gateway: str = ""
    """The gateway that sent it there, and writes its row unless another one gets the answer."""
    base: int = 0
    """Number of events of its stream that an earlier worker had sent: this one has those after them."""
    given_up: bool = False
    """True if the call has found its key taken and gives up: whoever goes on with it has an id of its own."""


class CallPlaces:
    """Places of keyed calls: written when one is sent to a worker, removed when its key is free again."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._decoder = RecordDecoder(CallPlace)
        self._traces = RecordDecoder(InvocationTrace)

    async def read(self, digest: str) -> CallPlace | None:
        raw = cast(bytes | None, await self._client.get(keys.call_place(digest)))
        try:
            return self._decoder.decode(raw) if raw else None
        except UnreadableRecord:
            return None

    async def write(self, digest: str, place: CallPlace, *, kept_s: float) -> None:
        await self._client.set(keys.call_place(digest), msgspec.json.encode(place), ex=max(1, round(kept_s)))

    async def remove(self, digest: str) -> None:
        await self._client.delete(keys.call_place(digest))

    async def mark(self, digest: str, invocation: InvocationId, *, given_up: bool) -> None:
        """Says of a call that it is given up, or is not after all."""
        place = await self.read(digest)
        if place is not None and place.invocation == invocation and place.given_up != given_up:
            raw = msgspec.json.encode(msgspec.structs.replace(place, given_up=given_up))
            await self._client.set(keys.call_place(digest), raw, xx=True, keepttl=True)

    async def given_up(self, invocation: InvocationId) -> bool:
        """True if the call has its row, as one of a lost gateway or one that gave up when its key was taken: whoever
        goes on with it needs another id."""
        raw = cast(bytes | None, await self._client.get(keys.trace(invocation)))
        try:
            return raw is not None and self._traces.decode(raw).row.error in (LOST_GATEWAY, CLIENT_GONE)
        except UnreadableRecord:
            return False


class IdempotencyKeys:
    def __init__(self, client: redis.Redis, store: ObjectStore) -> None:
        self._client = client
        self._store = store
        self._script = Script(client, "idempotency")

    async def take(
        self,
        digest: str,
        claim: KeyClaim,
        instead_of: bytes = b"",
        left_ms: int | None = None,
        *,
        try_write: bool = False,
    ) -> Standing:
        """Takes the key if it is free, or stands as `instead_of` says and was not renewed since it had `left_ms`.

        Returns the valid claim, this one or an earlier call's. `try_write`: also tries if Redis takes writes.
        """
        raw, left, refused = await self._set(
            digest, instead_of, msgspec.json.encode(claim), RUNNING_MS, left_ms, try_write=try_write
        )
        return Standing(msgspec.json.decode(raw, type=KeyClaim), raw, left, refused)

    async def read(self, digest: str) -> tuple[KeyClaim, bytes] | None:
        raw = cast(bytes | None, await self._client.get(keys.idempotency(digest)))
        return (msgspec.json.decode(raw, type=KeyClaim), raw) if raw else None

    async def renew(self, digest: str, raw: bytes) -> KeyClaim | None:
        """Renews a claim, or makes it again if Redis has lost it; returns the other call's that stands instead."""
        return await self._replace(digest, raw, raw)

    async def rename(self, digest: str, raw: bytes, claim: KeyClaim) -> bytes:
        """Gives a claim that is held the invocation of `claim`; returns its bytes. Errors: KeyLost."""
        renamed = msgspec.json.encode(claim)
        if await self._replace(digest, raw, renamed) is not None:
            raise KeyLost("another call has taken this Idempotency-Key", hint="send it again with the same key")
        return renamed

    async def _replace(self, digest: str, raw: bytes, new: bytes) -> KeyClaim | None:
        found, _, _ = await self._set(digest, raw, new, RUNNING_MS)
        if not found:
            found, _, _ = await self._set(digest, b"", new, RUNNING_MS)
        return msgspec.json.decode(found, type=KeyClaim) if found != new else None

    async def free(self, digest: str, raw: bytes) -> None:
        await self._set(digest, raw, b"", 0)

    async def settle(self, digest: str, raw: bytes, claim: KeyClaim, body: bytes) -> None:
        """Stores the response for `KEPT_S`. Errors: StoreFailed."""
        inline = msgspec.structs.replace(claim, body=body)
        if claim.answer is not None and await self._has_room(len(msgspec.json.encode(inline))):
            claim = inline
        elif claim.answer is not None:
            key = answer_key(digest, claim.owner)
            until_unix_ms = time.time_ns() // 1_000_000 + KEPT_S * 1000
            await self._client.zadd(keys.IDEMPOTENCY_KEPT, {key: until_unix_ms})
            await self._store.create(key, pack(claim.answer, body))
            claim = msgspec.structs.replace(claim, answer=msgspec.structs.replace(claim.answer, headers=[]))
        await self._set(digest, raw, msgspec.json.encode(claim), KEPT_S * 1000)

    async def _has_room(self, size_bytes: int) -> bool:
        """Checks whether Redis takes a response of this size in this hour; then it is counted."""
        if size_bytes > INLINE_BYTES:
            return False
        taken = keys.idempotency_bytes(int(time.time()) // HOUR_S)
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.incrby(taken, size_bytes)
            pipe.expire(taken, 2 * HOUR_S)
            total_bytes, _ = await pipe.execute()
        return int(total_bytes) <= INLINE_HOUR_BYTES

    async def answer(self, digest: str, claim: KeyClaim) -> tuple[Answer, bytes] | None:
        """Reads the response; None if the store does not have it any more. Errors: StoreFailed."""
        if claim.answer is not None and claim.body is not None:
            return claim.answer, claim.body
        data = await self._store.read(answer_key(digest, claim.owner), ANSWER_MAX_BYTES + HEAD_MAX_BYTES)
        return unpack(data, Answer) if data is not None else None

    async def sweep(self, now_unix_ms: int) -> int:
        """Deletes expired responses; returns their number. Errors: StoreFailed."""
        found = await self._client.zrangebyscore(keys.IDEMPOTENCY_KEPT, "-inf", now_unix_ms, 0, 1000)
        old = cast(list[bytes], found)

        async def delete(key: bytes) -> None:
            await self._store.delete(key.decode())
            await self._client.zrem(keys.IDEMPOTENCY_KEPT, key)

        await in_parallel(DELETES, old, delete)
        return len(old)

    async def _set(
        self,
        digest: str,
        before: bytes,
        after: bytes,
        ttl_ms: int,
        left_ms: int | None = None,
        *,
        try_write: bool = False,
    ) -> tuple[bytes, int, bool]:
        most = "" if left_ms is None else left_ms
        args: list[bytes | int | str] = [before, after, ttl_ms, most, int(try_write)]
        raw, left, takes_writes = await self._script([keys.idempotency(digest)], args)
        return bytes(raw), int(left), not takes_writes


def digest_of(project: str, key: str) -> str:
    return hashlib.sha256(f"{project}\0{key}".encode()).hexdigest()


def new_claim(
    fingerprint: str, invocation: InvocationId, *, first: Version = NOT_KNOWN, accepts: bool = False
) -> KeyClaim:
    owner = secrets.token_hex(8)
    return KeyClaim(fingerprint=fingerprint, owner=owner, invocation=invocation, first=first, accepts=accepts)


def of_removed_function(claim: KeyClaim, ours: KeyClaim) -> bool:
    """Checks whether a claim of the same call has been for a function that had the name before, and was removed."""
    return 0 < claim.first < ours.first


def taken_over(ours: KeyClaim, standing: KeyClaim, place: CallPlace | None) -> KeyClaim:
    """The claim that takes the key from a silent gateway. A call that goes on at its worker keeps its id, and so does
    an async one: an id is accepted once, also if the silent gateway has stored the call or does so yet."""
    invocation = ours.invocation
    if place is not None:
        invocation = place.invocation
    elif ours.accepts and standing.accepts:
        invocation = standing.invocation
    return msgspec.structs.replace(ours, retaken=True, invocation=invocation)


def answer_key(digest: str, owner: str) -> str:
    return f"{FOLDER}{digest}/{owner}"
