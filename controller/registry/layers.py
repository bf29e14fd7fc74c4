"""Layers of packages in the store: those that no version has needed for a while are removed.

A layer is cheap to build again, and `fs deploy` sends what the store lacks. So it stays for a time after the last
function that had it was removed, and leaves then. That it is unused is noted in Redis at the first look, and forgotten
as soon as a version needs it again; `deletion_guard` covers deploys that come at the moment of the removal.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.function.layer import MANIFEST_OBJECT
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.object_keys import LAYERS

from ..state.redis_client import REDIS_ERRORS
from ..storage.object_store import ObjectStore, StoredObject
from .checkpoints import group_by_checkpoint
from .registry import Registry
from .unused_objects import UnusedObjects

log = logging.getLogger(__name__)

UNUSED_MS = 7 * 24 * 3_600_000
"""Time that an unused layer stays: a function that comes back within a week sends nothing."""
LOOK_EVERY_S = 3600.0


class LayerCollector:
    """Removes unused layers from the store."""

    def __init__(self, client: redis.Redis, store: ObjectStore, registry: Registry) -> None:
        self._unused = UnusedObjects(client, keys.LAYERS_UNUSED, UNUSED_MS)
        self._store = store
        self._registry = registry

    async def run(self) -> None:
        """Looks at once and every hour."""
        while True:
            try:
                await self.collect(time.time_ns() // 1_000_000)
            except (FleetError, *REDIS_ERRORS) as error:
                log.warning("unused layers were not looked for", extra={"error": str(error)})
            await asyncio.sleep(LOOK_EVERY_S)

    async def collect(self, now_unix_ms: int) -> int:
        """Removes the layers that have been unused for long enough; returns their number. Errors: FleetError,
        REDIS_ERRORS."""
        groups = group_by_checkpoint(await self._store.list(LAYERS), LAYERS)
        there = {layer for layer, objects in groups.items() if _is_published(objects)}
        outdated = await self._unused.look(there, await self._registry.uses(), now_unix_ms)
        for layer in outdated:
            await self._remove(layer, groups[layer], now_unix_ms)
        await self._unused.forget(outdated)
        return len(outdated)

    async def _remove(self, layer: CheckpointId, objects: Collection[StoredObject], now_unix_ms: int) -> None:
        token = await self._registry.deletion_guard.begin(layer, now_unix_ms)
        try:
            if layer in await self._registry.uses():  # a deploy was quicker
                return
            # The manifest first, so that nobody begins to read what is half removed.
            for stored in sorted(objects, key=lambda stored: not _is_manifest(stored)):
                await self._store.delete(stored.key)
            size_bytes = sum(stored.size_bytes for stored in objects)
            log.info("an unused layer is removed from the store", extra={"layer": layer, "size_bytes": size_bytes})
        finally:
            await self._registry.deletion_guard.end(layer, token)


def _is_published(objects: Collection[StoredObject]) -> bool:
    return any(_is_manifest(stored) for stored in objects)


def _is_manifest(stored: StoredObject) -> bool:
    return stored.key.endswith(f"/{MANIFEST_OBJECT}")
