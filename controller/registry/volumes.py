"""Volumes: their records in Redis, who uses them, and the sweep of what no version refers to any more.

A version that is removed leaves the record at once, and its files the store about a day later, however old they are:
a worker may still be starting on it, a put or a commit that found parts of it may refer to them, a backup may name it.
The first sweep that finds that no version needs them notes that in Redis, and their day begins then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Collection, Iterable
from difflib import get_close_matches
from typing import cast

import msgspec

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import FleetError, InvalidInput, LayerInvalid, NotFound, Refused
from fleetstart.runtime.contract.function.layer import MANIFEST_MAX_BYTES, MANIFEST_OBJECT, read_layer
from fleetstart.runtime.contract.function.names import project_of
from fleetstart.runtime.contract.function.volume import (
    VOLUMES_MAX,
    VolumeRecord,
    VolumeVersion,
    parse_volume,
    volume_name,
    with_version,
)
from fleetstart.runtime.contract.ids import LayerId
from fleetstart.runtime.contract.object_keys import PARTS, VOLUMES, volume_key

from ..schemas.volumes import NewVolumeVersion
from ..state.cas_hash import CasHash
from ..state.redis_client import REDIS_ERRORS
from ..state.sync import StateSync
from ..state.traffic import tracked_versions
from ..state.view import View
from ..storage.object_store import ObjectStore, StoredObject, require_volume
from .checkpoints import SWEEP_EVERY_S
from .unused_objects import UnusedObjects

log = logging.getLogger(__name__)

UNUSED_MS = 24 * 3_600_000
"""Time that files stay after the sweep that found no version which needs them."""


class Volumes:
    """Creates, publishes, prunes, removes and sweeps volumes. Errors: REDIS_ERRORS."""

    def __init__(self, state: StateSync, store: ObjectStore) -> None:
        self._state = state
        self._view = state.view
        self._store = store
        self._hash = CasHash(state, keys.VOLUMES, VolumeRecord)
        self._unused = UnusedObjects(state.client, keys.VOLUMES_UNUSED, UNUSED_MS)
        self._parts: dict[LayerId, frozenset[str]] = {}
        """Parts of each manifest in the store. Cache: the id is the manifest's digest."""

    def find(self, name: str) -> VolumeRecord:
        """Errors: NotFound."""
        record = self._view.access.volumes.get(name)
        if record is None:
            raise _unknown(name, self._view)
        return record

    async def create(self, name: str, by: str, now_unix_ms: int) -> VolumeRecord:
        """Creates an empty volume; one that exists stays as it is. Errors: InvalidInput."""
        if len(self._view.access.volumes) >= VOLUMES_MAX and name not in self._view.access.volumes:
            raise InvalidInput(f"there are {VOLUMES_MAX} volumes already, and cannot be more")
        bare = name.rpartition(".")[2]
        made = VolumeRecord(name=bare, project=project_of(name), created_unix_ms=now_unix_ms, created_by=by)
        record = await self._hash.change(name, lambda known: known or made)
        assert record is not None
        return record

    async def publish(self, name: str, new: NewVolumeVersion, by: str, now_unix_ms: int) -> tuple[VolumeRecord, bool]:
        """Adds a version; also returns whether it is new: files that the newest version has already make none.

        Errors: NotFound, Conflict, LayerInvalid, InvalidInput.
        """
        manifest = await require_volume(self._store, new.tree)
        version = VolumeVersion(
            number=0,
            tree=new.tree,
            size_bytes=manifest.total_bytes,
            files=len(manifest.files),
            new_bytes=new.new_bytes,
            created_unix_ms=now_unix_ms,
            created_by=by,
        )
        added = False

        def changed(known: VolumeRecord | None) -> VolumeRecord:
            nonlocal added
            if known is None:
                raise _unknown(name, self._view)
            added = known.latest is None or known.latest.tree != new.tree
            return with_version(known, new.base, version) if added else known

        record = await self._hash.change(name, changed)
        assert record is not None
        return record, added

    async def prune(self, name: str, keep: int) -> tuple[VolumeRecord, list[VolumeVersion]]:
        """Removes all but the newest versions; those that functions name stay. Returns what was removed."""
        pinned = pinned_versions(self._view, name)
        removed: list[VolumeVersion] = []

        def changed(known: VolumeRecord | None) -> VolumeRecord:
            nonlocal removed
            if known is None:
                raise _unknown(name, self._view)
            kept, removed = split_pruned(known.versions, keep, pinned)
            return msgspec.structs.replace(known, versions=kept)

        record = await self._hash.change(name, changed)
        assert record is not None
        return record, removed

    async def remove(self, name: str) -> VolumeRecord:
        """Removes a volume. Errors: NotFound; Refused while a function names it."""
        record = self.find(name)
        users = functions_using_volume(self._view, name)
        if users:
            raise Refused(
                f"volume {name} is used by {', '.join(users)}",
                hint=f"deploy without it, or remove what uses it first: fs rm {users[0]}",
            )
        await self._hash.change(name, lambda known: None)
        return record

    async def run(self) -> None:
        """Sweeps at once and every hour."""
        while True:
            try:
                await self.sweep(time.time_ns() // 1_000_000)
            except FleetError as error:
                log.warning("the store was not swept of volumes", extra={"error": error.message})
            except REDIS_ERRORS as error:
                log.warning("the store was not swept of volumes", extra={"error": str(error)})
            await asyncio.sleep(SWEEP_EVERY_S)

    async def sweep(self, now_unix_ms: int) -> int:
        """Deletes manifests and parts to which no version has referred for `UNUSED_MS`; returns their number. Parts of
        a manifest that stays, such as of a version that is being added, stay with it.

        Errors: StoreFailed; LayerInvalid for a manifest that cannot be read, whose parts nobody knows.
        """
        parts = await self._store.list(PARTS)  # before the manifests, so that a part's manifest is seen
        manifests = {_tree_of(stored): stored for stored in await self._store.list(VOLUMES)}
        needed = await self._keys_of(manifests.keys() & await self._trees())
        there = {stored.key: stored for stored in (*manifests.values(), *parts)}
        unused = await self._unused.look(there, needed, now_unix_ms)
        kept = {tree for tree, stored in manifests.items() if stored.key not in unused}
        held = await self._keys_of(kept)
        self._parts = {tree: found for tree, found in self._parts.items() if tree in kept}
        stale = [there[key] for key in unused if key not in held]
        for stored in stale:
            await self._store.delete(stored.key)
        await self._unused.forget(stored.key for stored in stale)
        if stale:
            log.info("volumes swept", extra={"objects": len(stale), "bytes": sum(one.size_bytes for one in stale)})
        return len(stale)

    async def _keys_of(self, trees: Iterable[LayerId]) -> set[str]:
        """Objects of trees: their manifests and all parts."""
        found = set[str]()
        for tree in trees:
            found.add(volume_key(tree, MANIFEST_OBJECT))
            found.update(PARTS + name for name in await self._parts_of(tree))
        return found

    async def _trees(self) -> frozenset[LayerId]:
        """All trees that records name. Errors: LayerInvalid for a record that cannot be read."""
        raw = await cast(Awaitable[list[bytes]], self._state.client.hvals(keys.VOLUMES))
        try:
            records = [msgspec.json.decode(one, type=VolumeRecord) for one in raw]
        except UNDECODABLE as error:
            raise LayerInvalid(f"the record of a volume cannot be read: {error}") from error
        return frozenset(version.tree for record in records for version in record.versions)

    async def _parts_of(self, tree: LayerId) -> frozenset[str]:
        if tree not in self._parts:
            data = await self._store.read(volume_key(tree, MANIFEST_OBJECT), MANIFEST_MAX_BYTES)
            manifest = await asyncio.to_thread(read_layer, data or b"", tree)
            self._parts[tree] = frozenset(part.object for part in manifest.parts)
        return self._parts[tree]


def split_pruned(
    versions: list[VolumeVersion], keep: int, pinned: Collection[int]
) -> tuple[list[VolumeVersion], list[VolumeVersion]]:
    """(kept, removed): the newest `keep` stay, and those that are pinned. Versions are in order, the oldest first."""
    newest = {version.number for version in versions[-keep:]} if keep else set()
    kept = [version for version in versions if version.number in newest or version.number in pinned]
    return kept, [version for version in versions if version not in kept]


def functions_using_volume(view: View, name: str) -> list[str]:
    """Functions of which a version in service names the volume."""
    return sorted({function for function, _ in _uses(view, name)})


def pinned_versions(view: View, name: str) -> dict[int, str]:
    """Versions of a volume that functions name by number, and one of these functions for each."""
    return {number: function for function, number in _uses(view, name) if number is not None}


def _uses(view: View, name: str) -> Iterable[tuple[str, int | None]]:
    """(function, version that it names) of each version in service."""
    for key, version in view.versions.items():
        record = view.functions.get(key.name)
        if record is None or key.version not in tracked_versions(record):
            continue
        for ref in map(parse_volume, version.spec.volumes):
            if volume_name(version.spec.home, ref.name) == name:
                yield str(key.name), ref.version


def _tree_of(stored: StoredObject) -> LayerId:
    return LayerId(stored.key.removeprefix(VOLUMES).partition("/")[0])


def _unknown(name: str, view: View) -> NotFound:
    near = get_close_matches(name, view.access.volume_names(project_of(name)), n=1)
    hint = f"did you mean {near[0]}?" if near else f"make it first: fs volume create {name[:63]}"
    return NotFound(f"volume {name[:130]} does not exist", hint=hint)
