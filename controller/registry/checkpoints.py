"""Checkpoints in the store: listing, verification before publishing, removal, and the sweep of abandoned uploads.

A checkpoint is published by its manifest. Parts without one belong to an upload (`uploads`); what none announced, as
older releases of `fs` do not, is swept when nothing was added for a day. A removal deletes the manifest first, so that
no read begins on a half-deleted checkpoint, and is rejected while a deployed function needs it (`deletion_guard` covers
concurrent deploys).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterable

import msgspec

from fleetstart.runtime.contract.errors import CheckpointInvalid, FleetError, NotFound, Refused, Unavailable
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.object_keys import CHECKPOINTS, LAYERS, checkpoint_key, is_digest
from fleetstart.runtime.contract.weights.lora import is_adapter
from fleetstart.runtime.contract.weights.manifest import (
    MANIFEST_MAX_BYTES,
    MANIFEST_OBJECT,
    Manifest,
    checkpoint_id,
    read_manifest,
)

from ..peers.report import nodes_with, reported_copies
from ..schemas.functions import CheckpointInfo
from ..state.redis_client import REDIS_ERRORS
from ..state.view import View
from ..storage.object_store import ObjectStore, StoredObject, Upload
from .registry import Registry
from .uploads import Uploads

log = logging.getLogger(__name__)

UNFINISHED_S = 24 * 3600.0
"""Age at which parts without a manifest are swept: longer than a broken upload waits to be resumed."""
INCOMING_S = 3600.0
"""Age at which an incoming file is swept: an upload in progress writes every few seconds."""
SWEEP_EVERY_S = 3600.0


class ManifestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a manifest without its tables, which take megabytes for a large model."""

    weight_bytes: int
    tensors: int
    files: int
    adapter: bool
    protected: bool
    sizes: dict[str, int]
    """Size of each part's object."""


class Checkpoints:
    """Lists, verifies, removes and sweeps checkpoints."""

    def __init__(self, store: ObjectStore, registry: Registry, uploads: Uploads) -> None:
        self._store = store
        self._registry = registry
        self._uploads = uploads
        self._summaries: dict[CheckpointId, ManifestSummary] = {}
        """Cache. The id is the manifest's digest, so an entry never changes."""

    async def list(self, *, unfinished: bool = False) -> list[CheckpointInfo]:
        """Lists checkpoints, newest first; with `unfinished`, also uploads that have no manifest yet."""
        groups = group_by_checkpoint(await self._store.list(CHECKPOINTS))
        uses = await self._registry.uses(strict=False)
        self._summaries = {
            checkpoint: summary for checkpoint, summary in self._summaries.items() if checkpoint in groups
        }
        infos = [
            await self._info(checkpoint, objects, uses.get(checkpoint, []))
            for checkpoint, objects in groups.items()
            if unfinished or _manifest_of(objects) is not None
        ]
        infos = _with_nodes(infos, self._registry.view, time.monotonic_ns())
        return sorted(infos, key=lambda info: (-info.created_unix_ms, info.id))

    async def manifest(self, checkpoint: CheckpointId) -> bytes:
        """Reads the manifest: the bytes whose digest is the id. Errors: NotFound."""
        data = await self._store.read(checkpoint_key(checkpoint, MANIFEST_OBJECT), MANIFEST_MAX_BYTES)
        if data is None:
            raise _unknown(checkpoint)
        return data

    async def publish(self, checkpoint: CheckpointId, data: bytes, now_unix_ms: int) -> bool:
        """Publishes a manifest whose parts are all in the store; False if it was published already.

        Errors: CheckpointInvalid; Unavailable, if parts were being removed meanwhile: then it is not published.
        """
        guard, key = self._registry.deletion_guard, checkpoint_key(checkpoint, MANIFEST_OBJECT)
        marks = await guard.marks([checkpoint], now_unix_ms)
        await self._check_parts(checkpoint, data)
        created = await self._store.put(key, Upload(key, _once(data)))
        try:
            same = await guard.marks([checkpoint], now_unix_ms) == marks
        except Unavailable:
            same = False
        if created and not same:
            await self._store.delete(key)
            raise Unavailable(f"parts of {checkpoint[:12]} were removed while it was published", retry_after_s=1)
        return created

    async def _check_parts(self, checkpoint: CheckpointId, data: bytes) -> None:
        """Verifies that all parts of a manifest are in the store before it is. Errors: CheckpointInvalid."""
        if await asyncio.to_thread(checkpoint_id, data) != checkpoint:
            return  # the store refuses it: it is not what its key says
        objects = await self._store.list(f"{CHECKPOINTS}{checkpoint}/")
        problem = first_missing_part((await summary_in(data, checkpoint)).sizes, objects)
        if problem:
            raise CheckpointInvalid(
                f"checkpoint {checkpoint[:12]} cannot be published: {problem}",
                hint="push again: it sends what is missing, then the manifest",
            )

    async def remove(self, checkpoint: CheckpointId, now_unix_ms: int) -> CheckpointInfo:
        """Removes a checkpoint. Errors: NotFound; Refused while a version of a deployed function needs it."""
        token = await self._registry.deletion_guard.begin(checkpoint, now_unix_ms)
        try:
            uses = (await self._registry.uses()).get(checkpoint, [])
            if uses:
                functions = " ".join(sorted({use.partition("@")[0] for use in uses}))
                raise Refused(
                    f"checkpoint {checkpoint[:12]} is used by {', '.join(uses)}",
                    hint=f"remove what uses it first: fs rm {functions}",
                )
            objects = await self._store.list(f"{CHECKPOINTS}{checkpoint}/")
            if not objects:
                raise _unknown(checkpoint)
            info = await self._info(checkpoint, objects, [])
            await self._delete(objects)
            await self._uploads.forget(checkpoint)
        finally:
            await self._registry.deletion_guard.end(checkpoint, token)
        self._summaries.pop(checkpoint, None)
        return info

    async def run(self) -> None:
        """Sweeps at once and every hour."""
        while True:
            try:
                await self.sweep(time.time_ns() // 1_000_000)
            except (FleetError, *REDIS_ERRORS) as error:
                log.warning("the store was not swept", extra={"error": str(error)})
            await asyncio.sleep(SWEEP_EVERY_S)

    async def sweep(self, now_unix_ms: int) -> int:
        """Deletes the objects of abandoned uploads, of layers too; returns their number."""
        swept = await self._store.sweep(INCOMING_S) + await self._uploads.sweep(now_unix_ms)
        for folder in (CHECKPOINTS, LAYERS):
            groups = group_by_checkpoint(await self._store.list(folder), folder)
            for upload in orphaned_uploads(groups, now_unix_ms):
                swept += await self._sweep_folder(folder, upload, now_unix_ms)
        return swept

    async def _sweep_folder(self, folder: str, upload: CheckpointId, now_unix_ms: int) -> int:
        """Deletes what an abandoned upload has left, unless somebody goes on with it: it looks again under a mark."""
        token = await self._registry.deletion_guard.begin(upload, now_unix_ms)
        try:
            objects = await self._store.list(f"{folder}{upload}/")
            going_on = upload in await self._uploads.open_checkpoints(now_unix_ms)
            if going_on or not orphaned_uploads({upload: objects}, now_unix_ms):
                return 0
            log.info("an abandoned upload is swept", extra={"upload": f"{folder}{upload[:12]}"})
            await self._delete(objects)
            return len(objects)
        finally:
            await self._registry.deletion_guard.end(upload, token)

    async def _delete(self, objects: Collection[StoredObject]) -> None:
        for stored in sorted(objects, key=lambda stored: not stored.key.endswith("/" + MANIFEST_OBJECT)):
            await self._store.delete(stored.key)

    async def _info(
        self, checkpoint: CheckpointId, objects: Collection[StoredObject], used_by: Iterable[str]
    ) -> CheckpointInfo:
        summary, problem = None, "its upload is not complete"
        stored = _manifest_of(objects)
        if stored is not None:
            try:
                summary = await self._summary_of(checkpoint)
                problem = first_missing_part(summary.sizes, objects)
            except (CheckpointInvalid, NotFound) as error:
                problem = error.message
        return CheckpointInfo(
            id=checkpoint,
            complete=not problem,
            problem=problem,
            weight_bytes=summary.weight_bytes if summary else 0,
            object_bytes=sum(stored.size_bytes for stored in objects),
            tensors=summary.tensors if summary else 0,
            files=summary.files if summary else 0,
            parts=len(summary.sizes) if summary else len(objects),
            adapter=summary.adapter if summary else False,
            protected=summary.protected if summary else False,
            created_unix_ms=(stored or max(objects, key=lambda one: one.modified_unix_ms)).modified_unix_ms,
            used_by=list(used_by),
        )

    async def _summary_of(self, checkpoint: CheckpointId) -> ManifestSummary:
        if checkpoint not in self._summaries:
            self._summaries[checkpoint] = await summary_in(await self.manifest(checkpoint), checkpoint)
        return self._summaries[checkpoint]


def _with_nodes(infos: Iterable[CheckpointInfo], view: View, now_ns: int) -> list[CheckpointInfo]:
    """The checkpoints, with the nodes that have them in memory."""
    holders, copies = nodes_with(view, now_ns), reported_copies(view, now_ns)
    return [
        msgspec.structs.replace(
            info,
            in_memory=list(holders.get(info.id, ())),
            copies=[copy.node for copy in copies if copy.checkpoint == info.id],
        )
        for info in infos
    ]


async def summary_in(data: bytes, checkpoint: CheckpointId) -> ManifestSummary:
    """Reads a manifest in a thread: the checks of a large one take seconds, and the event loop renews leases."""
    return await asyncio.to_thread(lambda: summarize(read_manifest(data, checkpoint)))


def group_by_checkpoint(
    objects: Iterable[StoredObject], folder: str = CHECKPOINTS
) -> dict[CheckpointId, list[StoredObject]]:
    """Groups objects by checkpoint, or by layer. Other objects are left out."""
    groups: dict[CheckpointId, list[StoredObject]] = {}
    for stored in objects:
        checkpoint, _, name = stored.key.removeprefix(folder).partition("/")
        if is_digest(checkpoint) and name:
            groups.setdefault(CheckpointId(checkpoint), []).append(stored)
    return groups


def orphaned_uploads(groups: dict[CheckpointId, list[StoredObject]], now_unix_ms: int) -> list[CheckpointId]:
    """Checkpoints without a manifest to which nothing was added for `UNFINISHED_S`."""
    oldest_unix_ms = now_unix_ms - UNFINISHED_S * 1000
    return [
        checkpoint
        for checkpoint, objects in groups.items()
        if objects
        and _manifest_of(objects) is None
        and max(stored.modified_unix_ms for stored in objects) < oldest_unix_ms
    ]


def summarize(manifest: Manifest) -> ManifestSummary:
    return ManifestSummary(
        weight_bytes=manifest.weight_bytes,
        tensors=len(manifest.tensors) + len(manifest.aliases),
        files=len(manifest.files),
        adapter=is_adapter(manifest),
        protected=manifest.is_protected,
        sizes={part.object: part.header_bytes + part.data_bytes for part in manifest.parts},
    )


def first_missing_part(expected: dict[str, int], objects: Iterable[StoredObject]) -> str:
    """Names the first part that is missing or of another size; "" if there is none."""
    found = {stored.key.rpartition("/")[2]: stored.size_bytes for stored in objects}
    for name, size_bytes in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != size_bytes:
            return f"{name} has {found[name]:,} bytes, its manifest says {size_bytes:,}"
    return ""


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _manifest_of(objects: Iterable[StoredObject]) -> StoredObject | None:
    return next((stored for stored in objects if stored.key.endswith("/" + MANIFEST_OBJECT)), None)


def _unknown(checkpoint: CheckpointId) -> NotFound:
    return NotFound(f"checkpoint {checkpoint[:12]} is not in the store", hint="`fs weights ls` lists what is")
