"""The history writer and store with a real Redis: gateways add up, nothing is counted twice, hashes are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import redis.asyncio as redis

from fleetstart.controller.history.call_counts import CallCounts
from fleetstart.controller.history.series import CELLS, HOUR_MS, MINUTE_MS, history_of, span_of
from fleetstart.controller.history.store import ALL, Cell, HistoryStore
from fleetstart.controller.history.writer import CELLS_MAX, HistoryWriter
from fleetstart.controller.observability.latency_sketch import BOUNDS_MS
from fleetstart.controller.schemas.history import CallHistory
from fleetstart.controller.state.redis_client import REDIS_ERRORS, connect
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import InvocationRow
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version, WorkerId
from tests.servers import RedisServer

NOW_S = 1_800_000_000.0
HASH_MAX_BYTES = 150_000
"""Memory of an hour of minutes, each with calls in every bucket; a usual one takes a tenth of it."""


class Clock:
    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


def row(function: str = "f", **fields: Any) -> InvocationRow:
    return InvocationRow(
        id=InvocationId("i"), function=FunctionName(function), version=Version(1), worker=WorkerId("w"),
        accepted_unix_ms=0, billed_ms=1, memory_bytes=1, cost_nusd=3,
        **{"status": 200, "total_ms": 5, "queue_ms": 0, **fields},
    )  # fmt: skip


async def history(client: redis.Redis, function: str, range_name: str = "1h", *, now_s: float = NOW_S) -> CallHistory:
    span = span_of(range_name, "", int(now_s * 1000))
    cells = await HistoryStore(client).read([function], span)
    return history_of(function, span, ((cell.begin_unix_ms, cell.counts) for cell in cells))


@pytest.fixture
def with_client(redis_url: str) -> Callable[[Callable[[redis.Redis], Coroutine[Any, Any, None]]], None]:
    def run(test: Callable[[redis.Redis], Coroutine[Any, Any, None]]) -> None:
        async def connected() -> None:
            client = connect(redis_url)
            try:
                await test(client)
            finally:
                await client.aclose()

        asyncio.run(connected())

    return run


Run = Callable[[Callable[[redis.Redis], Coroutine[Any, Any, None]]], None]


def test_gateways_add_up_and_a_batch_that_is_repeated_counts_once(with_client: Run) -> None:
    async def test(client: redis.Redis) -> None:
        clock = Clock()
        one, other = (HistoryWriter(client, name, clock=clock) for name in ("gw-1", "gw-2"))
        for writer in (one, other):
            writer.ended(row())
            writer.ended(row("g", status=500, start="cold", queue_ms=400))
            await writer.write()
        one.ended(row())
        await one.write()
        await one.write()
        clock.now_s += 60
        one.ended(row(total_ms=900))
        await one.write()
        f, g, everything = [await history(client, name, now_s=clock.now_s) for name in ("f", "g", ALL)]
        assert (f.total.calls, f.total.failed, f.total.cost_nusd) == (4, 0, 12)
        assert [point.calls for point in f.points[-2:]] == [3, 1]
        assert (g.total.calls, g.total.failed, g.total.cold) == (2, 2, 2)
        assert 400 <= (g.total.wait_p50_ms or 0) <= 460
        assert (everything.total.calls, everything.total.failed) == (6, 2)
        assert all([await client.ttl(name) > 0 for name in await client.keys("fs:history:*")])
        month = await history(client, "f", "30d", now_s=clock.now_s)
        assert (month.total.calls, month.points[-1].calls) == (4, 4)

    with_client(test)


def test_what_redis_did_not_take_is_written_when_it_is_back(with_client: Run, redis_server: RedisServer) -> None:
    async def test(client: redis.Redis) -> None:
        writer = HistoryWriter(client, "gw-1", clock=Clock())
        writer.ended(row())
        redis_server.kill()
        with pytest.raises(REDIS_ERRORS):
            await writer.write()
        writer.ended(row())
        redis_server.start()
        await writer.write()
        assert (await history(client, "f")).total.calls == 2

    with_client(test)


def test_the_memory_of_a_gateway_is_bounded(with_client: Run) -> None:
    async def test(client: redis.Redis) -> None:
        clock = Clock()
        writer = HistoryWriter(client, "gw-1", clock=clock)
        for number in range(CELLS_MAX):
            writer.ended(row(f"f{number}"))
        await writer.write()
        assert (await history(client, f"f{CELLS_MAX - 1}")).total.calls == 1
        assert (await history(client, "f0")).total.calls == 0, "the oldest were dropped"
        clock.now_s += 2 * 3600
        writer.ended(row())
        await writer.write()
        assert writer.cells == 4, "a minute and an hour, of the function and of all"

    with_client(test)


def test_a_hash_expires_and_takes_a_bounded_memory(with_client: Run) -> None:
    async def test(client: redis.Redis) -> None:
        sketch = dict.fromkeys(range(len(BOUNDS_MS)), 1000)
        first = int(NOW_S * 1000) // HOUR_MS * 60
        full = CallCounts(calls=10**6, cost_nusd=10**12, total_ms=sketch, wait_ms=sketch)
        cells = {Cell("f", "minutes", number): full for number in range(first, first + 60)}
        await HistoryStore(client).write("gw-0123456789ab", cells, expire=cells)
        [name] = await client.keys("fs:history:*")
        assert name == keys.history("minutes", "f", first * MINUTE_MS // HOUR_MS).encode()
        assert int(await client.memory_usage(name, samples=0) or 0) <= HASH_MAX_BYTES
        assert 0 < await client.ttl(name) <= CELLS["minutes"].kept_s

    with_client(test)


def test_a_cell_that_is_not_understood_is_left_out(with_client: Run) -> None:
    async def test(client: redis.Redis) -> None:
        writer = HistoryWriter(client, "gw-1", clock=Clock())
        writer.ended(row())
        await writer.write()
        [name] = [name for name in await client.keys("fs:history:minutes:f:*")]
        await client.hset(name, mapping={"broken": b"\x01", f"{int(NOW_S) // 60}:gw-2": b"\xc1"})
        assert (await history(client, "f")).total.calls == 1

    with_client(test)
