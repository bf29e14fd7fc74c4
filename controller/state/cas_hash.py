"""A hash in Redis (of keys, projects, secrets or volumes) that is changed by compare-and-set, each change published.

Gateways read all of them again when a change is published, and once a second anyway: a revoked key stays valid for that
long where a publication was lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar, cast

import msgspec

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.durability import on_disk
from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord

from .redis_client import Script
from .sync import StateSync
from .unreadable import unreadable

Record = TypeVar("Record", bound=msgspec.Struct)
TRIES = 20
DISK_TRIES = 3
DISK_MS = 1_400
"""Timeout of one wait for Redis to sync its log, which it does once a second; below the client's own timeout."""


class CasHash(Generic[Record]):
    """Records of one type in a Redis hash."""

    def __init__(self, state: StateSync, name: str, kind: type[Record]) -> None:
        self._state = state
        self._name = name
        self._decoder = RecordDecoder(kind)
        self._swap = Script(state.client, "compare_and_set")

    async def change(
        self, field: str, change: Callable[[Record | None], Record | None], *, durable: bool = False
    ) -> Record | None:
        """Replaces a record by `change(record)`; None is no record. The view has the new one when this returns, and
        Redis' disk, too, if it is `durable`.

        Errors: those of `change`, Unavailable (also for a record that this release cannot read), REDIS_ERRORS.
        """
        for _ in range(TRIES):
            raw = await cast(Awaitable[bytes | None], self._state.client.hget(self._name, field)) or b""
            new = change(self._decoded(field, raw))
            data = msgspec.json.encode(new) if new is not None else b""
            if data == raw or await self._swap([self._name], [field, raw, data, keys.EVENTS_FUNCTIONS]):
                await self._state.resync()
                if not durable or await self._reach_disk(field, data):
                    return new
        raise Unavailable(f"{field}: other changes kept coming first", retry_after_s=1)

    async def _reach_disk(self, field: str, data: bytes) -> bool:
        """Waits until the change is on Redis' disk: a Redis that is killed before has it not any more. False if it is
        lost: the Redis that answers now may be another one than that which took it.

        Errors: Unavailable, REDIS_ERRORS.
        """
        for _ in range(DISK_TRIES):
            async with self._state.client.pipeline(transaction=False) as pipe:
                pipe.set(keys.durable("change"), 1, ex=DISK_MS // 1000 + 1)  # WAITAOF is for writes of its connection
                pipe.execute_command("WAITAOF", 1, 0, DISK_MS)
                pipe.hget(self._name, field)
                written, answer, there = await pipe.execute(raise_on_error=False)
            for failed in (written, there):
                if isinstance(failed, Exception):
                    raise failed
            if (there or b"") != data:
                return False
            if on_disk(answer) != "not yet":
                return True
        raise Unavailable(
            f"{field} is changed, and not on Redis' disk after {DISK_TRIES * DISK_MS / 1000:.0f} s: a crash of Redis "
            "may undo it",
            hint="change it again, the same way; `fs status` tells of Redis",
            retry_after_s=1,
        )

    async def read(self, field: str) -> Record | None:
        """One record, as Redis has it now. Errors: as of `stored`."""
        raw = await cast(Awaitable[bytes | None], self._state.client.hget(self._name, field)) or b""
        return self._decoded(field, raw)

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
