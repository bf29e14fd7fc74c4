from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import msgspec
import pytest
from starlette.requests import Request

from fleetstart.controller.api import traces
from fleetstart.controller.api.functions import INFOS_AT_ONCE, FunctionsApi
from fleetstart.controller.api.metrics import ObservabilityApi
from fleetstart.controller.api.traces import History
from fleetstart.controller.billing.budgets import DAY_S
from fleetstart.controller.billing.ledger_reader import PAGE_ROWS, LedgerReader
from fleetstart.controller.history.call_counts import CallCounts
from fleetstart.controller.history.service import HistoryApi
from fleetstart.controller.history.store import ALL, Cell, HistoryStore
from fleetstart.controller.observability.activity import Activity
from fleetstart.controller.registry.registry import Registry
from fleetstart.controller.schemas.functions import FunctionInfo, FunctionSummary
from fleetstart.controller.schemas.history import FunctionTotal
from fleetstart.controller.state.records import FunctionRecord, VersionKey, VersionRecord
from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.state.redis_server.stream_followers import StreamFollowers
from fleetstart.controller.state.view import View
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import APPEND_KEYS, LedgerRow, append_args, append_script
from fleetstart.runtime.contract.function.spec import FunctionSpec, spec_digest
from fleetstart.runtime.contract.ids import BundleId, FunctionName, Version
from tests.controller.billing.rows import call, phase


def view_of(number: int) -> View:
    view, first = View(), Version(1)
    for index in range(number):
        name = FunctionName(f"f{index}")
        spec = FunctionSpec(name=name, bundle=BundleId("0" * 64), entry="handler:run", memory_bytes=1 << 26)
        view.functions[name] = FunctionRecord(name=name, live=first, deployed_unix_ms=1, started=first)
        view.versions[VersionKey(name, first)] = VersionRecord(
            version=first, digest=spec_digest(spec), spec=spec, segment_bytes=0, created_unix_ms=1
        )
    return view


def request() -> Request:
    return Request({"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""})


def test_a_long_list_gives_the_loop_its_turns() -> None:
    async def scenario() -> None:
        number = 10 * INFOS_AT_ONCE
        view = view_of(number)
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
        full = msgspec.json.encode(await making)
        listed = msgspec.json.decode(full, type=list[FunctionInfo])
        assert [info.name for info in listed] == sorted(f"f{index}" for index in range(number) if index != 7)
        shown = msgspec.json.encode(await api.infos(lambda name: name != "f7", summary=True))
        summaries = msgspec.json.decode(shown, type=list[FunctionSummary])
        assert [(one.name, one.version) for one in summaries] == [(one.name, one.version) for one in listed]
        assert len(shown) < len(full) / 20, "pages that list functions read it every two seconds"

    asyncio.run(scenario())


def test_what_each_of_many_functions_costs_and_does_is_shown(redis_url: str) -> None:
    """The first page's costs of today, and the functions of a bar of the history."""

    async def scenario() -> None:
        last = FunctionName("f999")
        async with connect(redis_url) as client:
            view, never = view_of(1000), cast(Any, None)
            day = time.time_ns() // 1_000_000 // (DAY_S * 1000)
            spent: dict[Any, Any] = {
                f"{one}:{name}": 7 for name in (last, "f0") for one in (day, day + 1)
            }  # midnight may pass now
            await client.hset(keys.LEDGER_SPENT, mapping=spent)
            reader = LedgerReader(client, never)
            shown = ObservabilityApi(client, reader, view, calls=never, lag=never, process=never, budgets=never)
            activity = msgspec.json.decode((await shown.activity(request())).body, type=Activity)
            assert {one.function: one.cost_today_nusd for one in activity.functions} == {last: 7, "f0": 7}

            minute = time.time_ns() // 60_000_000_000 - 1
            await HistoryStore(client).write("gw", {Cell(last, "minutes", minute): CallCounts(calls=3)}, expire=())
            told = (await HistoryApi(client, never, view).functions(request())).body
            (found,) = msgspec.json.decode(told, type=list[FunctionTotal])
            assert (found.function, found.total.calls) == (last, 3)

    asyncio.run(scenario())


def test_a_functions_calls_are_found_behind_any_number_of_rows(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle workers write a row each ten seconds: `fs trace` said of a function that it had never been called."""
    monkeypatch.setattr(traces, "NEWEST_ROWS", 5)
    name = FunctionName("f")

    async def scenario() -> None:
        async with connect(redis_url) as client:

            async def book(*rows: LedgerRow) -> None:
                async with client.pipeline(transaction=False) as pipe:
                    for row in rows:
                        pipe.eval(append_script(), len(APPEND_KEYS), *APPEND_KEYS, *append_args(row))
                    await pipe.execute()

            await book(*(call(f"f-{number}", function="f") for number in range(3)))
            await book(*(phase(f"w/idle/{number}") for number in range(PAGE_ROWS)), call("f-last", function="f"))
            minute = time.time_ns() // 60_000_000_000
            cells = {
                Cell(one, "minutes", at): CallCounts(calls=2) for at in (minute - 1, minute) for one in (name, ALL)
            }
            await HistoryStore(client).write("gw", cells, expire=())
            history = History(client, LedgerReader(client, cast(Any, None)))
            for limit, ids in ((9, ["f-last", "f-2", "f-1", "f-0"]), (2, ["f-last", "f-2"])):
                for one in (name, ALL):
                    found = await history.latest(one, lambda row: row.function == name, limit, 0)
                    assert [row.id for row in found] == ids

    asyncio.run(scenario())
