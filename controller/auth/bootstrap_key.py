"""Creates the first API key, unless the controller was started without keys; until then all requests are rejected.

The key's text is written to the controller's home before its hash to Redis, so a controller that is killed in between
leaves no unknown key. If Redis was lost, the key that the home has is registered again.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import Unavailable

from ..http.json_api import now_unix_ms
from ..schemas.access import AuditEvent
from ..state.access_records import LOCAL, KeyRecord, digest
from ..state.cas_hash import CasHash
from ..state.redis_client import REDIS_ERRORS
from ..state.sync import StateSync
from .audit_log import AuditLog
from .owner_key_file import NAME, load_or_create, owner_key_record

log = logging.getLogger(__name__)


class BootstrapKey:
    def __init__(self, state: StateSync, audit: AuditLog, path: Path) -> None:
        self._state = state
        self._audit = audit
        self._path = path
        self._hash = CasHash(state, keys.KEYS, KeyRecord)
        self._changed = asyncio.Event()
        self._changed.set()
        state.view.on_change(self._changed.set)
        self.there = asyncio.Event()
        """Set once a key exists."""

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not self._state.view.synced:
                continue
            if not self._state.view.access.locked:
                with suppress(Unavailable):
                    await self._try()
            if self._state.view.access.locked:
                self.there.set()

    async def _try(self) -> None:
        try:
            await self._make()
        except REDIS_ERRORS as error:  # an OSError of the file's, too; tried again with the next reading of Redis
            log.error("the first key cannot be created", extra={"path": str(self._path), "error": str(error)})

    async def _make(self) -> None:
        known_before = self._path.exists()
        shown = await asyncio.to_thread(load_or_create, self._path)
        wanted = owner_key_record(shown, NAME, now_unix_ms())
        record = await self._hash.change(NAME, lambda known: known or wanted)
        if record is not None and record.credentials[0].id == shown.id:
            event = AuditEvent(
                unix_ms=now_unix_ms(), by=LOCAL, address=LOCAL, verb="key.create", object=f"key {NAME}", status=201,
                after=digest(record),
            )  # fmt: skip
            await self._audit.write(event)
            log.info("created the first key", extra={"path": str(self._path)})
        elif not known_before:
            self._path.unlink(missing_ok=True)  # another home's controller was quicker: this text is good for nothing
