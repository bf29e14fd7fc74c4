"""Trial of an object store: writes an object, reads it back and deletes it."""

from __future__ import annotations

import asyncio
import secrets

from fleetstart.runtime.contract.errors import StoreFailed

from .object_store import ObjectStore

PREFIX = "probe/"
PROBE_BYTES = 64


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
