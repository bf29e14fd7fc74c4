"""Functions and their versions: immutable, numbered for ever, one of them live.

A deploy is refused unless all that the version needs is whole in the store; the same spec as the live one makes no
new version, but gives a broken one another chance. Every change is compare-and-set in one script.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import cast

import msgspec

from fleetstart.controller.objects import ObjectStore, require_bundle, require_checkpoint
from fleetstart.controller.records import FunctionRecord, VersionKey, VersionRecord
from fleetstart.controller.state import Script, State
from fleetstart.runtime.contract import keys
from fleetstart.runtime.contract.errors import NotFound, Unavailable
from fleetstart.runtime.contract.function import FunctionSpec, spec_digest
from fleetstart.runtime.contract.ids import FunctionName, Version

TRIES = 20
"""Deploys of one function at the same moment, each losing to another: more is a bug."""


class Registry:
    def __init__(self, state: State, store: ObjectStore) -> None:
        self._state = state
        self._store = store
        self._script = Script(state.client, "registry")

    async def deploy(self, spec: FunctionSpec, now_unix_ms: int) -> tuple[VersionRecord, bool]:
        """The live version, and whether it is new. Errors: InvalidSpec, WeightsMissing, CheckpointInvalid."""
        digest = spec_digest(spec)
        await require_bundle(self._store, spec.name, spec.bundle)
        segment_bytes = 0
        if spec.weights is not None:
            segment_bytes = (await require_checkpoint(self._store, spec.name, spec.weights)).total_bytes
        for _ in range(TRIES):
            raw = await self._raw(spec.name)
            live = await self._live(raw)
            created = live is None or live.digest != digest
            record = live
            if record is None or created:
                record = VersionRecord(
                    version=await self._next_version(spec.name),
                    digest=digest,
                    spec=spec,
                    segment_bytes=segment_bytes,
                    created_unix_ms=now_unix_ms,
                )
            if await self._change(spec.name, raw, record, created, now_unix_ms):
                await self._state.resync()
                return record, created
        raise Unavailable(f"function {spec.name}: somebody else deploys it again and again", retry_after_s=1)

    async def delete(self, name: FunctionName) -> None:
        """The name is free at once; its workers are drained by the scheduler. Versions keep their numbers."""
        for _ in range(TRIES):
            raw = await self._raw(name)
            live = await self._live(raw)
            if live is None:
                raise NotFound(f"function {name} does not exist", hint="`fs ls` lists what does")
            if await self._run(name, raw, b"", live.version, b""):
                await self._state.resync()
                return
        raise Unavailable(f"function {name}: somebody else deploys it again and again", retry_after_s=1)

    async def _change(
        self, name: FunctionName, raw: bytes, record: VersionRecord, created: bool, now_unix_ms: int
    ) -> bool:
        new = raw
        if created:
            new = msgspec.json.encode(FunctionRecord(name=name, live=record.version, deployed_unix_ms=now_unix_ms))
        return await self._run(name, raw, new, record.version, msgspec.json.encode(record) if created else b"")

    async def _run(self, name: FunctionName, raw: bytes, new: bytes, version: Version, record: bytes) -> bool:
        return bool(
            await self._script(
                [keys.FUNCTIONS, keys.versions(name), keys.failures(name, version)],
                [name, raw, new, version, record, keys.EVENTS_FUNCTIONS],
            )
        )

    async def _raw(self, name: FunctionName) -> bytes:
        return await cast(Awaitable[bytes | None], self._state.client.hget(keys.FUNCTIONS, name)) or b""

    async def _live(self, raw: bytes) -> VersionRecord | None:
        if not raw:
            return None
        record = msgspec.json.decode(raw, type=FunctionRecord)
        return await self._state.version(VersionKey(record.name, record.live))

    async def _next_version(self, name: FunctionName) -> Version:
        taken = await cast(Awaitable[list[bytes]], self._state.client.hkeys(keys.versions(name)))
        return Version(max((int(number) for number in taken), default=0) + 1)
