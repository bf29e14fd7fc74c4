"""A hash in Redis (of keys, projects, secrets or volumes) that is changed by compare-and-set, each change published.

Gateways read all of them again when a change is published, and once a second anyway: a revoked key stays valid for that
long where a publication was lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar, cast

import msgspec

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord

from .redis_client import Script
from .sync import StateSync
from .unreadable import unreadable

Record = TypeVar("Record", bound=msgspec.Struct)
TRIES = 20


class CasHash(Generic[Record]):
    """Records of one type in a Redis hash."""

    def __init__(self, state: StateSync, name: str, kind: type[Record]) -> None:
        self._state = state
        self._name = name
        self._decoder = RecordDecoder(kind)
        self._swap = Script(state.client, "compare_and_set")

    async def change(self, field: str, change: Callable[[Record | None], Record | None]) -> Record | None:
        """Replaces a record by `change(record)`; None is no record. The view has the new one when this returns.

        Errors: those of `change`, Unavailable (also for a record that this release cannot read), REDIS_ERRORS.
        """
        for _ in range(TRIES):
            raw = await cast(Awaitable[bytes | None], self._state.client.hget(self._name, field)) or b""
            new = change(self._decoded(field, raw))
            data = msgspec.json.encode(new) if new is not None else b""
            if data == raw or await self._swap([self._name], [field, raw, data, keys.EVENTS_FUNCTIONS]):
                await self._state.resync()
                return new
        raise Unavailable(f"{field}: other changes kept coming first", retry_after_s=1)

    async def stored(self) -> dict[str, Record]:
        """All records, as Redis has them now. Errors: Unavailable for one that cannot be read, REDIS_ERRORS."""
        raw = await cast(Awaitable[dict[bytes, bytes]], self._state.client.hgetall(self._name))
        found = {field.decode(): self._decoded(field.decode(), data) for field, data in raw.items()}
        return {field: record for field, record in found.items() if record is not None}

    def _decoded(self, field: str, raw: bytes) -> Record | None:
        try:
            return self._decoder.decode(raw) if raw else None
        except UnreadableRecord as error:
            raise unreadable(f"the record of {field}", error) from error
