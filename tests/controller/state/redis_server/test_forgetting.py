"""What the view has read and nothing needs is forgotten."""

from __future__ import annotations

import asyncio

import msgspec

from fleetstart.controller.state.full_resync import VERSIONS_KEPT
from fleetstart.controller.state.records import FunctionRecord, VersionKey
from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.state.sync import StateSync
from fleetstart.controller.state.view import View
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import Version
from tests.controller.state.redis_server.test_lost_writes import F, spec, write_version


def test_old_versions_are_forgotten_and_read_again_when_they_are_asked_for(redis_url: str) -> None:
    async def scenario() -> None:
        client, view = connect(redis_url), View()
        state, last = StateSync(client, view), VERSIONS_KEPT + 200
        await write_version(client, 1, spec())
        raw = await client.hget(keys.versions(F), "1")
        assert raw is not None
        await client.hset(keys.versions(F), mapping={str(number): raw for number in range(1, last + 1)})
        record = FunctionRecord(name=F, live=Version(last), deployed_unix_ms=1, started=Version(last))
        await client.hset(keys.FUNCTIONS, F, msgspec.json.encode(record))
        await state.resync()
        await asyncio.gather(*(state.version(VersionKey(F, Version(number))) for number in range(1, last)))
        assert len(view.versions) == last
        await state.resync()
        assert len(view.versions) <= VERSIONS_KEPT + 2
        assert VersionKey(F, Version(last)) in view.versions
        assert await state.version(VersionKey(F, Version(1))) is not None
        await client.aclose()

    asyncio.run(scenario())
