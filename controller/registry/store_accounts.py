"""Accounts of what each project has put into the object store, and its quota there.

An object belongs to the project whose key sent it first; equal objects are stored once and counted once. It is counted
before it is sent, by the length that the request declares, so that parallel uploads do not pass the quota together.
What nodes write, versions of volumes that functions commit, is not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import InvalidInput, QuotaExceeded, Unavailable
from fleetstart.runtime.contract.object_keys import parse_key
from fleetstart.runtime.contract.sizes import MIB

from ..state.access_records import Quotas
from ..state.redis_client import REDIS_ERRORS, Script
from ..storage.object_store import ObjectStore, StoredObject, Upload


class StoreAccounts:
    """Counts objects by project, in Redis."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._reserve = Script(client, "reserve_object")
        self._forget = Script(client, "forget_object")

    async def reserve(self, key: str, project: str, size_bytes: int | None, quotas: Quotas) -> bool:
        """Counts an object that is about to come; False if it is counted already, or nobody has to.

        Errors: QuotaExceeded; InvalidInput if its size is not known and there is a quota; Unavailable while Redis does
        not answer and there is one.
        """
        limited = (quotas.store_bytes, quotas.objects) != (None, None)
        if size_bytes is None:
            if limited:
                raise InvalidInput(f"{key}: its size is not declared", hint="send it with Content-Length")
            return False
        return await self.reserve_all({key: size_bytes}, project, quotas)

    async def reserve_all(self, objects: Mapping[str, int], project: str, quotas: Quotas) -> bool:
        """Counts objects that are about to come, by their sizes, all or none; False if all are counted already.

        Errors: QuotaExceeded; Unavailable while Redis does not answer and there is a quota.
        """
        limits = (quotas.store_bytes, quotas.objects)
        shown = ["" if limit is None else limit for limit in limits]
        each = [part for item in objects.items() for part in item]
        try:
            answer: Any = await self._reserve([keys.STORED, keys.STORED_SUMS], [project, *shown, *each])
        except REDIS_ERRORS as error:
            if limits != (None, None):
                raise Unavailable("Redis does not answer, so quotas are not known", retry_after_s=1) from error
            return False
        if answer[0] < 0:
            raise _exceeded(project, quotas, objects, int(answer[1]), int(answer[2]))
        return bool(answer[0])

    async def forget(self, *objects: str, project: str = "") -> None:
        """Takes objects off the account that they are counted to; with `project`, only off that of this project.
        Without Redis they stay there until they are deleted again."""
        with contextlib.suppress(*REDIS_ERRORS):
            await self._forget([keys.STORED, keys.STORED_SUMS], [project, *objects])

    async def used(self, *projects: str) -> list[tuple[int, int]]:
        """Bytes and objects of each project. Errors: REDIS_ERRORS."""
        fields = [f"{project}:{what}" for project in projects for what in ("bytes", "objects")]
        answer: Any = await self._client.hmget(keys.STORED_SUMS, fields)
        numbers = [int(one or 0) for one in answer]
        return list(zip(numbers[::2], numbers[1::2], strict=True))


def _exceeded(project: str, quotas: Quotas, coming: Mapping[str, int], used_bytes: int, objects: int) -> QuotaExceeded:
    size_bytes = sum(coming.values())
    if quotas.objects is not None and objects + len(coming) > quotas.objects:
        more = "" if len(coming) == 1 else f", and {len(coming)} more are to come"
        return QuotaExceeded(
            f"project {project} may have {quotas.objects} objects in the store, and has {objects}{more}",
            hint=f"remove weights or volumes that nothing needs; or an admin raises it: "
            f"fs project quota {project} --objects {2 * (objects + len(coming) - 1)}",
        )
    return QuotaExceeded(
        f"project {project} may have {quotas.store_bytes:,} bytes in the store, has {used_bytes:,}, and {size_bytes:,} "
        "more came",
        hint=f"remove weights or volumes that nothing needs; or an admin raises it: "
        f"fs project quota {project} --store {-(-(used_bytes + size_bytes) // MIB)}MiB",
    )


class AccountedStore:
    """An object store that takes what is deleted off its project's account."""

    def __init__(self, store: ObjectStore, accounts: StoreAccounts) -> None:
        self._store = store
        self._accounts = accounts

    async def put(self, key: str, upload: Upload) -> bool:
        return await self._store.put(key, upload)

    async def create(self, key: str, data: bytes) -> bool:
        return await self._store.create(key, data)

    async def size(self, key: str) -> int | None:
        return await self._store.size(key)

    async def read(self, key: str, limit_bytes: int) -> bytes | None:
        return await self._store.read(key, limit_bytes)

    def read_range(self, key: str, offset: int, size_bytes: int) -> AsyncGenerator[bytes, None]:
        return self._store.read_range(key, offset, size_bytes)

    async def list(self, prefix: str) -> list[StoredObject]:
        return await self._store.list(prefix)

    async def delete(self, key: str) -> None:
        await self._store.delete(key)
        if parse_key(key) is not None:  # others are the platform's own
            await self._accounts.forget(key)

    async def sweep(self, older_than_s: float) -> int:
        return await self._store.sweep(older_than_s)
