"""An object store in memory, which takes time, fails, and fails after it has stored what it was given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

from fleetstart.controller.storage.object_store import ObjectStore, StoredObject
from fleetstart.runtime.contract.errors import StoreFailed
from tests.simulation.processes import Process


class Objects:
    """All objects, and when each was written."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.data: dict[str, tuple[bytes, int]] = {}
        self.loss = 0.0

    def of(self, process: Process) -> ObjectStore:
        return cast(ObjectStore, _Connection(self))


class _Connection:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def _reach(self) -> None:
        chance = self._objects.world.chance
        await asyncio.sleep(chance.uniform(0.001, 0.02))
        if self._objects.loss and chance.random() < self._objects.loss / 2:
            raise StoreFailed("the object store does not answer")

    async def _answered(self) -> None:
        chance = self._objects.world.chance
        await asyncio.sleep(chance.uniform(0.001, 0.02))
        if self._objects.loss and chance.random() < self._objects.loss / 2:
            raise StoreFailed("the object store's answer was lost")

    async def create(self, key: str, data: bytes) -> bool:
        await self._reach()
        new = key not in self._objects.data
        if new:
            self._objects.data[key] = (data, self._objects.world.unix_ms())
        await self._answered()
        return new

    async def size(self, key: str) -> int | None:
        await self._reach()
        found = self._objects.data.get(key)
        return len(found[0]) if found is not None else None

    async def read(self, key: str, limit_bytes: int) -> bytes | None:
        await self._reach()
        found = self._objects.data.get(key)
        return found[0] if found is not None else None

    async def read_range(self, key: str, offset: int, size_bytes: int) -> AsyncGenerator[bytes, None]:
        await self._reach()
        yield self._objects.data[key][0][offset : offset + size_bytes]

    async def list(self, prefix: str) -> list[StoredObject]:
        await self._reach()
        return [
            StoredObject(key=key, size_bytes=len(data), modified_unix_ms=modified_unix_ms)
            for key, (data, modified_unix_ms) in self._objects.data.items()
            if key.startswith(prefix)
        ]

    async def delete(self, key: str) -> None:
        await self._reach()
        self._objects.data.pop(key, None)
        await self._answered()

    async def sweep(self, older_than_s: float) -> int:
        return 0
