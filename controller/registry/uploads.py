"""Uploads of checkpoints: who has announced which parts, how many bytes of them may come, and until when.

An upload begins with the manifest, which names each part, its digest and its size. Its project is charged for all that
the store lacks before a byte is sent; then parts come in any order, at any controller. It is one a project and
checkpoint, so a push that broke goes on in it, and equal pushes share it. It ends when the manifest is published, when
it is aborted, or when nothing came for a day; parts that no published manifest and no other upload names are then
deleted. Whoever deletes leaves a mark first (`deletion_guard`), which beginning and publishing look for afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Collection
from typing import Any, cast

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import Conflict, InvalidInput, NotFound, QuotaExceeded, Unavailable
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.object_keys import CHECKPOINTS, LAYOUT_OBJECT, checkpoint_key
from fleetstart.runtime.contract.weights.manifest import MANIFEST_OBJECT, checkpoint_id, read_manifest

from ..state.access_records import Quotas
from ..storage.object_store import ObjectStore, StoredObject
from .deletion_guard import DeletionGuard
from .store_accounts import StoreAccounts

log = logging.getLogger(__name__)

OPEN_MS = 24 * 3_600_000
"""How long an upload stays open without a new part: longer than a broken push waits to be gone on with."""
OPEN_MAX = 64
"""Open uploads of a project: a record has a line for each part, and Redis keeps them all."""


class UploadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an upload has announced. It never changes; `fs:uploads:ends` has its end."""

    id: str
    checkpoint: CheckpointId
    project: str
    key: str
    """Name of the API key that began it."""
    parts: dict[str, int]
    """Bytes of each object, the manifest among them."""
    begun_unix_ms: int

    def check(self, name: str, size_bytes: int | None) -> int:
        """The bytes of an object that is about to come. Errors: InvalidInput, if it was not announced like that."""
        announced = self.parts.get(name)
        if announced is None:
            raise InvalidInput(
                f"upload {self.id[:80]} has not announced {name[:100]}", hint="the manifest names each part"
            )
        if size_bytes is not None and size_bytes != announced:
            raise InvalidInput(f"{name} has {size_bytes:,} bytes, its manifest says {announced:,}")
        return announced


class OpenUpload(msgspec.Struct, frozen=True, kw_only=True):
    record: UploadRecord
    ends_unix_ms: int
    stored: list[StoredObject]
    """Those of its objects that are in the store."""


class Uploads:
    """Begins, lists, aborts and sweeps uploads. Errors: REDIS_ERRORS."""

    def __init__(self, client: redis.Redis, store: ObjectStore, accounts: StoreAccounts) -> None:
        self._client = client
        self._store = store
        self._accounts = accounts
        self._guard = DeletionGuard(client)

    async def begin(self, data: bytes, *, project: str, key: str, quotas: Quotas, now_unix_ms: int) -> OpenUpload:
        """Opens the upload of a manifest, or goes on with it. Errors: CheckpointInvalid; QuotaExceeded; Unavailable
        while the checkpoint is being removed."""
        checkpoint = checkpoint_id(data)
        manifest = await asyncio.to_thread(read_manifest, data, checkpoint)
        sizes = {part.object: part.header_bytes + part.data_bytes for part in manifest.parts}
        marks = await self._guard.marks([checkpoint], now_unix_ms)
        known = await self.find(project, checkpoint, now_unix_ms)
        record = known or UploadRecord(
            id=upload_id(project, checkpoint),
            checkpoint=checkpoint,
            project=project,
            key=key,
            parts={**sizes, MANIFEST_OBJECT: len(data)},
            begun_unix_ms=now_unix_ms,
        )
        if known is None:
            await self._require_place(project, now_unix_ms)
        await self._write(record, now_unix_ms)
        try:
            if await self._guard.marks([checkpoint], now_unix_ms) != marks:
                raise Unavailable(f"{checkpoint[:12]} is being removed from the store", retry_after_s=1)
            stored = await self._stored(record)
            missing = {checkpoint_key(checkpoint, name): record.parts[name] for name in _missing(record, stored)}
            await self._accounts.reserve_all(missing, project, quotas)
        except BaseException:
            if known is None:
                await self._delete(record)
            raise
        return OpenUpload(record=record, ends_unix_ms=now_unix_ms + OPEN_MS, stored=stored)

    async def find(self, project: str, checkpoint: CheckpointId, now_unix_ms: int) -> UploadRecord | None:
        """The open upload of a project; None if there is none, or it has ended."""
        id = upload_id(project, checkpoint)
        raw = await cast(Awaitable[bytes | None], self._client.hget(keys.UPLOADS, id))
        ends = await self._client.zscore(keys.UPLOADS_ENDS, id)
        return _decoded(raw) if raw is not None and ends is not None and ends > now_unix_ms else None

    async def received(self, record: UploadRecord, name: str, now_unix_ms: int) -> None:
        """Notes that an object has come: the manifest ends the upload, parts prolong it. Errors: Conflict, if it was
        aborted meanwhile; the part is then deleted again."""
        if name == MANIFEST_OBJECT:
            await self._delete(record)
            return
        await self._client.zadd(keys.UPLOADS_ENDS, {record.id: now_unix_ms + OPEN_MS}, xx=True)
        if await self._client.zscore(keys.UPLOADS_ENDS, record.id) is not None:
            return
        if await self._discard(record, [name], now_unix_ms):
            raise Conflict(
                f"upload {record.id[:80]} was aborted while {name} came",
                hint="push again: it announces its parts anew",
            )

    async def open_uploads(self, now_unix_ms: int, *, project: str | None = None) -> list[OpenUpload]:
        """Open uploads, newest first: all, or those of a project."""
        found = [
            OpenUpload(record=record, ends_unix_ms=ends, stored=await self._stored(record))
            for record, ends in await self._all()
            if ends > now_unix_ms and project in (None, record.project)
        ]
        return sorted(found, key=lambda one: (-one.record.begun_unix_ms, one.record.id))

    async def open_checkpoints(self, now_unix_ms: int) -> set[CheckpointId]:
        """Checkpoints whose parts are expected."""
        return {record.checkpoint for record, ends in await self._all() if ends > now_unix_ms}

    async def abort(self, id: str, now_unix_ms: int) -> OpenUpload:
        """Ends an upload, and deletes its parts unless something else names them. Errors: NotFound."""
        found = [(record, ends) for record, ends in await self._all() if record.id == id and ends > now_unix_ms]
        if not found:
            raise no_upload(id)
        record, ends = found[0]
        told = OpenUpload(record=record, ends_unix_ms=ends, stored=await self._stored(record))
        await self._discard(record, record.parts, now_unix_ms)
        return told

    async def sweep(self, now_unix_ms: int) -> int:
        """Ends the uploads to which nothing came for too long. Returns the number of objects that were deleted."""
        swept = 0
        for record, ends in await self._all():
            if ends <= now_unix_ms:
                log.info("an abandoned upload is swept", extra={"upload": record.id})
                swept += await self._discard(record, record.parts, now_unix_ms)
        return swept

    async def forget(self, checkpoint: CheckpointId) -> None:
        """Ends all uploads of a checkpoint that was removed."""
        for record, _ in await self._all():
            if record.checkpoint == checkpoint:
                await self._delete(record)
                await self._release(record, [])

    async def _discard(self, record: UploadRecord, names: Collection[str], now_unix_ms: int) -> int:
        """Ends an upload, and deletes objects that it announced and nothing else names; returns how many."""
        token = await self._guard.begin(record.checkpoint, now_unix_ms)
        try:
            await self._delete(record)
            folder = await self._store.list(f"{CHECKPOINTS}{record.checkpoint}/")
            await self._release(record, folder)
            if record.checkpoint in await self.open_checkpoints(now_unix_ms):
                return 0
            by_name = {_name(stored): stored for stored in folder}
            if MANIFEST_OBJECT in by_name:
                return 0
            doomed = [by_name[name] for name in (*names, LAYOUT_OBJECT) if name in by_name]
            for stored in doomed:
                await self._store.delete(stored.key)
            return len(doomed)
        finally:
            await self._guard.end(record.checkpoint, token)

    async def _release(self, record: UploadRecord, stored: Collection[StoredObject]) -> None:
        """Takes what did not come off the account of the upload's project."""
        absent = record.parts.keys() - {_name(one) for one in stored}
        if absent:
            gone = [checkpoint_key(record.checkpoint, name) for name in sorted(absent)]
            await self._accounts.forget(*gone, project=record.project)

    async def _require_place(self, project: str, now_unix_ms: int) -> None:
        open_ = [record for record, ends in await self._all() if ends > now_unix_ms and record.project == project]
        if len(open_) >= OPEN_MAX:
            raise QuotaExceeded(
                f"project {project} has {len(open_)} open uploads, {OPEN_MAX} at most",
                hint="`fs weights uploads` lists them; `fs weights abort ID` ends one",
            )

    async def _all(self) -> list[tuple[UploadRecord, int]]:
        """All uploads with their ends, those that are over too; what another release wrote is left out."""
        raw = await cast(Awaitable[dict[bytes, bytes]], self._client.hgetall(keys.UPLOADS))
        scored: Any = await self._client.zrange(keys.UPLOADS_ENDS, 0, -1, withscores=True)
        ends = {id: int(end) for id, end in scored}
        records = [(_decoded(text), ends.get(id, 0)) for id, text in raw.items()]
        return [(record, end) for record, end in records if record is not None]

    async def _stored(self, record: UploadRecord) -> list[StoredObject]:
        folder = await self._store.list(f"{CHECKPOINTS}{record.checkpoint}/")
        return [stored for stored in folder if _name(stored) in record.parts]

    async def _write(self, record: UploadRecord, now_unix_ms: int) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.hset(keys.UPLOADS, record.id, msgspec.json.encode(record))
            pipe.zadd(keys.UPLOADS_ENDS, {record.id: now_unix_ms + OPEN_MS})
            await pipe.execute()

    async def _delete(self, record: UploadRecord) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.hdel(keys.UPLOADS, record.id)
            pipe.zrem(keys.UPLOADS_ENDS, record.id)
            await pipe.execute()


def upload_id(project: str, checkpoint: CheckpointId) -> str:
    return f"{project}:{checkpoint}"


def project_of_upload(id: str) -> str:
    """The project in an upload's id; empty if it is none."""
    return id.rpartition(":")[0]


def no_upload(id: str) -> NotFound:
    return NotFound(f"upload {id[:80]} is not open", hint="`fs weights uploads` lists those that are")


def _missing(record: UploadRecord, stored: Collection[StoredObject]) -> list[str]:
    whole = {_name(one) for one in stored if one.size_bytes == record.parts[_name(one)]}
    return [name for name in record.parts if name not in whole]


def _name(stored: StoredObject) -> str:
    return stored.key.rpartition("/")[2]


def _decoded(raw: bytes) -> UploadRecord | None:
    try:
        return msgspec.json.decode(raw, type=UploadRecord)
    except UNDECODABLE:
        return None
