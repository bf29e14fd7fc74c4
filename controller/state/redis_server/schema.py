"""Schema of the records in Redis: its number, and the least that a release must know to read them.

Fields that a release does not know are ignored, and records that it cannot read are left alone: most changes need no
other number. One is due when records that an earlier release takes for its own would mean something else to it. Then
`READABLE_FROM` rises too, and a controller of an earlier release does not start on that Redis.
"""

from __future__ import annotations

from importlib.metadata import version

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.process.environment import ConfigError

from ..redis_client import Script

SCHEMA = 1
"""Of the records that this release writes."""
READABLE_FROM = 1
"""The earliest schema whose releases read them rightly."""


class WrittenSchema(msgspec.Struct, frozen=True, kw_only=True):
    """What Redis says of its records: by the latest release that has written there."""

    schema: int
    readable_from: int
    release: str


async def claim_schema(client: redis.Redis, own: int = SCHEMA, readable_from: int = READABLE_FROM) -> WrittenSchema:
    """Writes the schema of this release, unless a later one is there; returns what holds. Errors: REDIS_ERRORS;
    ConfigError if records are there that this release would misread."""
    written = WrittenSchema(schema=own, readable_from=readable_from, release=version("fleetstart"))
    raw = await Script(client, "claim_schema")([keys.SCHEMA], [own, msgspec.json.encode(written)])
    found = msgspec.json.decode(raw, type=WrittenSchema)
    if found.readable_from > own:
        raise ConfigError(
            f"Redis has records of release {found.release} (schema {found.schema}), which this release (schema {own}) "
            "would misread: start the later one, or restore a backup of before the upgrade into an empty Redis"
        )
    return found
