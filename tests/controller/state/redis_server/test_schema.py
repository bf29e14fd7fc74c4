from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.state.redis_server.schema import SCHEMA, WrittenSchema, claim_schema
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.process.environment import ConfigError
from tests.controller.conftest import ControllerProcess
from tests.servers import RedisServer


def test_the_later_schema_stays_and_its_readers_go_on(redis_url: str) -> None:
    async def scenario() -> None:
        client = connect(redis_url)
        assert (await claim_schema(client, 1, 1)).schema == 1
        assert (await claim_schema(client, 3, 1)).schema == 3
        assert (await claim_schema(client, 2, 1)).schema == 3, "both read both: two releases run side by side"
        assert (await claim_schema(client, 4, 3)).readable_from == 3
        assert (await claim_schema(client, 3, 1)).schema == 4
        with pytest.raises(ConfigError, match=r"\(schema 4\), which this release \(schema 2\) would misread"):
            await claim_schema(client, 2, 1)
        await client.aclose()

    asyncio.run(scenario())


def test_a_controller_does_not_start_on_records_that_it_would_misread(
    tmp_path: Path, redis_url: str, redis_server: RedisServer
) -> None:
    later = WrittenSchema(schema=SCHEMA + 2, readable_from=SCHEMA + 1, release="99.1")
    with redis_server.client() as client:
        client.set(keys.SCHEMA, msgspec.json.encode(later))
        before = client.keys("*")
        refused = ControllerProcess(tmp_path, redis_url)
        try:
            refused.spawn()
            assert refused.process is not None
            assert refused.process.wait(timeout=30) == 2
            assert "Redis has records of release 99.1" in refused.log()
            assert client.keys("*") == before, "it has written nothing"
            client.set(keys.SCHEMA, msgspec.json.encode(msgspec.structs.replace(later, readable_from=SCHEMA)))
            refused.start()
            assert msgspec.json.decode(client.get(keys.SCHEMA), type=WrittenSchema).release == "99.1"
        finally:
            refused.close()
