"""What a gateway knows of money: kept current with a real Redis, and without it."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from fleetstart.controller.billing.budget_watch import BudgetWatch
from fleetstart.controller.billing.budgets import BudgetEvent, budget_of
from fleetstart.controller.schemas.functions import BudgetTerms
from fleetstart.controller.state.redis_client import REDIS_ERRORS, connect
from fleetstart.controller.state.view import View
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import APPEND_KEYS, InvocationRow, append_args, append_script
from fleetstart.runtime.contract.billing.prices import FIRST
from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.ids import FunctionName
from tests.controller.billing.rows import call
from tests.servers import RedisServer, until

F = FunctionName("f")
DAY_MS = 86_400_000


async def write(client: object, *rows: InvocationRow) -> None:
    for row in rows:
        await client.eval(append_script(), len(APPEND_KEYS), *APPEND_KEYS, *append_args(row))  # type: ignore[attr-defined]


def test_what_was_spent_is_known_from_redis_and_from_our_own_calls(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        client = connect(redis_server.url)
        unwritten: list[InvocationRow] = []
        watch = BudgetWatch(client, View(), unwritten=lambda: unwritten, fence=lambda: 1)
        budget = budget_of(F, BudgetTerms(limit_nusd=100, per="day"))
        await client.hset(keys.BUDGETS, F, msgspec.json.encode(budget))
        await write(client, call("a", cost=40), call("other", cost=999, function="g"))
        await watch.read()
        [state] = watch.states
        now = state.period.renews_unix_ms - 1
        assert state.spent_nusd == 40

        watch.note(call("b", cost=59))
        assert watch.refusal(F, now) is None
        watch.note(call("c", cost=1))
        assert watch.refusal(F, now) is not None
        assert watch.refusal(FunctionName("g"), now) is None

        unwritten[:] = [call("b", cost=59)]
        await write(client, call("c", cost=1))
        await watch.read()
        assert watch.states[0].spent_nusd == 100, "each once, wherever it is now"

        redis_server.kill()
        with suppress(*REDIS_ERRORS):
            await watch.read()
        assert watch.refusal(F, now) is not None, "known without Redis"
        await client.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("step_ms", [-DAY_MS, DAY_MS])
def test_a_budget_ends_calls_whatever_day_it_is_by_the_gateways_clock(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, step_ms: int
) -> None:
    """Rows count to the day on which they are booked, by Redis' clock."""

    async def scenario() -> None:
        async with connect(redis_url) as client:
            watch = BudgetWatch(client, View(), unwritten=list, fence=lambda: 0)
            budget = budget_of(F, BudgetTerms(limit_nusd=100, per="day"))
            await client.hset(keys.BUDGETS, F, msgspec.json.encode(budget))
            await write(client, call("a", cost=100))
            right_ns = time.time_ns
            monkeypatch.setattr(time, "time_ns", lambda: right_ns() + step_ms * 1_000_000)
            await watch.read()
            [state] = watch.states
            assert state.spent_nusd == 100
            assert watch.refusal(F, time.time_ns() // 1_000_000) is not None
            renewed = watch.refusal(F, state.period.renews_unix_ms + step_ms + 60_000)
            assert renewed is None, "its day is over by then"

    asyncio.run(scenario())


def test_people_are_told_once_whoever_schedules(redis_url: str) -> None:
    async def scenario() -> None:
        client = connect(redis_url)
        budget = budget_of(F, BudgetTerms(limit_nusd=100, per="month", alert_percent=50))
        await client.hset(keys.BUDGETS, F, msgspec.json.encode(budget))
        stages = []
        for cost in (49, 1, 10, 90):
            await write(client, call(f"c{cost}", cost=cost))
            for _ in range(2):  # the second one schedules after the first has died
                await _runs_until_read(BudgetWatch(client, View(), unwritten=list, fence=lambda: 1))
            written: Any = await client.xrange(keys.ALERTS)
            events = [msgspec.json.decode(fields[b"event"], type=BudgetEvent) for _, fields in written]
            stages.append([event.stage for event in events])
        assert stages == [[], ["alert"], ["alert"], ["alert", "spent"]]
        await client.aclose()

    asyncio.run(scenario())


def test_a_scheduler_of_old_writes_no_kept_workers(redis_url: str) -> None:
    async def scenario() -> None:
        client, view = connect(redis_url), View()
        view.synced = True
        await client.set(keys.FENCE, 8)
        await client.hset(keys.KEPT, "w-of-the-new-one", "1")
        await _runs_until_read(BudgetWatch(client, view, unwritten=list, fence=lambda: 7))
        assert await client.hkeys(keys.KEPT) == [b"w-of-the-new-one"]
        await _runs_until_read(BudgetWatch(client, view, unwritten=list, fence=lambda: 8))
        assert await client.hkeys(keys.KEPT) == []
        await client.aclose()

    asyncio.run(scenario())


async def _runs_until_read(watch: BudgetWatch) -> None:
    running = asyncio.create_task(watch.run())
    await until(lambda: watch.alert_rounds)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_no_price_is_made_up(redis_url: str) -> None:
    async def scenario() -> None:
        client = connect(redis_url)
        watch = BudgetWatch(client, View(), unwritten=list, fence=lambda: 0)
        with pytest.raises(Unavailable, match="prices are not known yet"):
            watch.price(5)
        later = msgspec.structs.replace(FIRST, version=2, from_unix_ms=1000, execute_nusd_per_gib_s=5)
        await client.hset(keys.PRICES, "2", msgspec.json.encode(later))
        await watch.read()
        assert (watch.price(999), watch.price(1000)) == (FIRST, later)
        await client.aclose()

    asyncio.run(scenario())
