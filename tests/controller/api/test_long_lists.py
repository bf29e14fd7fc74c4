from __future__ import annotations

import asyncio
from typing import cast

import msgspec

from fleetstart.controller.api.functions import INFOS_AT_ONCE, FunctionsApi
from fleetstart.controller.registry.registry import Registry
from fleetstart.controller.schemas.functions import FunctionInfo
from fleetstart.controller.state.records import FunctionRecord, VersionKey, VersionRecord
from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.state.redis_server.stream_followers import StreamFollowers
from fleetstart.controller.state.view import View
from fleetstart.runtime.contract.function.spec import FunctionSpec, spec_digest
from fleetstart.runtime.contract.ids import BundleId, FunctionName, Version


def test_a_long_list_gives_the_loop_its_turns() -> None:
    async def scenario() -> None:
        view, number, first = View(), 10 * INFOS_AT_ONCE, Version(1)
        for index in range(number):
            name = FunctionName(f"f{index}")
            spec = FunctionSpec(name=name, bundle=BundleId("0" * 64), entry="handler:run", memory_bytes=1 << 26)
            view.functions[name] = FunctionRecord(name=name, live=first, deployed_unix_ms=1, started=first)
            view.versions[VersionKey(name, first)] = VersionRecord(
                version=first, digest=spec_digest(spec), spec=spec, segment_bytes=0, created_unix_ms=1
            )
        client = connect("redis://127.0.0.1:1")
        api = FunctionsApi(
            url="http://x", view=view, registry=cast(Registry, None), client=client,
            followers=StreamFollowers(client, client), stopping=asyncio.Event(),
        )  # fmt: skip
        turns = 0
        making = asyncio.create_task(api.infos(lambda name: name != "f7"))
        while not making.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns >= 10
        listed = msgspec.json.decode(msgspec.json.encode(await making), type=list[FunctionInfo])
        assert [info.name for info in listed] == [f"f{index}" for index in range(number) if index != 7]

    asyncio.run(scenario())
