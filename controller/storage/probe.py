"""Trial of an object store: writes an object, reads it back and deletes it. And the object by which nodes measure
their links to it."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets

from fleetstart.runtime.contract.errors import FleetError, StoreFailed
from fleetstart.runtime.contract.object_keys import LINK_PROBE, LINK_PROBE_BYTES

from .object_store import ObjectStore

log = logging.getLogger(__name__)

PREFIX = "probe/"
PROBE_BYTES = 64
CHECK_EVERY_S = 600.0


async def try_store(store: ObjectStore, *, timeout_s: float) -> None:
    """Returns if the store keeps what is written. Errors: StoreFailed, with the cause and what to do."""
    key, data = f"{PREFIX}{secrets.token_hex(8)}", secrets.token_bytes(PROBE_BYTES)
    try:
        async with asyncio.timeout(timeout_s):
            await store.create(key, data)
            found = await store.read(key, PROBE_BYTES)
            await store.delete(key)
            if found != data:
                raise StoreFailed(f"{key}: the store gave back other bytes than were written")
    except TimeoutError as error:
        raise StoreFailed(
            f"the store did not answer within {timeout_s:g} s", hint="check its address, and the way to it"
        ) from error


class LinkProbe:
    """Keeps an object in a store behind a network, that nodes read a part of when they come up."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def run(self) -> None:
        """Writes the object once, if it is not there; nodes do without until then."""
        while True:
            try:
                if await self._store.size(LINK_PROBE) != LINK_PROBE_BYTES:
                    # Random: a link or a store that compresses would look faster than it is for weights.
                    await self._store.create(LINK_PROBE, os.urandom(LINK_PROBE_BYTES))
            except FleetError as error:
                log.info("the object for measuring links was not written", extra={"error": error.message})
            await asyncio.sleep(CHECK_EVERY_S)
