"""Schedules: what is due at which moment, and that a moment is fired once, whoever schedules."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis.asyncio as redis
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.controller.async_invocations import cron_schedules
from fleetstart.controller.async_invocations.cron_schedules import (
    LATE_S,
    CronScheduler,
    ScheduleMark,
    check_due,
    check_schedule,
    next_unix_s,
    schedule_id,
)
from fleetstart.controller.async_invocations.store.invocations import InvocationStore
from fleetstart.controller.async_invocations.store.payloads import PayloadStore
from fleetstart.controller.async_invocations.store.redis_clock import RedisClock
from fleetstart.controller.async_invocations.submit import AsyncSubmitter
from fleetstart.controller.state.records import FunctionRecord, VersionKey, VersionRecord
from fleetstart.controller.state.view import View
from fleetstart.controller.storage.folder_store import FolderStore
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import BudgetSpent, FleetError, InvalidSpec, QueueFull, StoreFailed, Unavailable
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version
from tests.controller.async_invocations.conftest import Client
from tests.controller.conftest import ControllerProcess, HandNode
from tests.controller.scheduler.test_autoscaler import spec as plain_spec
from tests.servers import RedisServer, wait_until


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


def scheduled(schedule: str, timezone: str = "") -> FunctionSpec:
    return msgspec.structs.replace(plain_spec(), schedule=schedule, timezone=timezone)


def test_the_next_moment_is_told_in_the_schedules_timezone() -> None:
    assert next_unix_s("*/5 * * * *", "", at("2026-11-22T10:03:00")) == at("2026-11-22T10:05:00")
    assert next_unix_s("0 9 * * 1-5", "Europe/Berlin", at("2026-11-22T00:00:00")) == at("2026-11-23T08:00:00")
    assert next_unix_s("0 9 * * *", "Europe/Berlin", at("2026-07-01T00:00:00")) == at("2026-07-01T07:00:00")


@pytest.mark.parametrize(
    ("schedule", "after", "due"),
    [
        ("30 2 * * *", "2026-10-25T00:10:00", "2026-10-25T00:30:00"),
        ("30 2 * * *", "2026-10-25T01:10:00", "2026-10-26T01:30:00"),
        ("0 * * * *", "2026-10-25T00:00:00", "2026-10-25T01:00:00"),
        ("30 2 * * *", "2026-03-29T00:10:00", "2026-03-29T01:00:00"),
    ],
    ids=["first of two hours", "second of two hours", "each of two hours", "an hour that is none"],
)
def test_a_moment_is_never_before_that_after_which_it_is_asked_for(schedule: str, after: str, due: str) -> None:
    """Berlin's clock shows 2 to 3 o'clock twice on 25 October, and not at all on 29 March."""
    assert next_unix_s(schedule, "Europe/Berlin", at(after)) == at(due)


@pytest.mark.parametrize(
    ("schedule", "timezone"), [("61 * * * *", ""), ("0 9 31 2 *", ""), ("a b c d e", ""), ("0 9 * * *", "Mars/Base"),
                               ("", "Europe/Berlin"), ("0 9 * * *", "../../etc/passwd")],
)  # fmt: skip
def test_a_schedule_that_is_none_is_refused(schedule: str, timezone: str) -> None:
    with pytest.raises(InvalidSpec):
        check_schedule(scheduled(schedule, timezone))


def test_a_new_schedule_waits_for_its_first_moment_and_missed_ones_are_skipped() -> None:
    spec = scheduled("*/5 * * * *")
    begun = check_due(spec, None, at("2026-11-22T10:05:01"))
    assert begun.fire_unix_s is None
    soon = check_due(spec, begun.mark, at("2026-11-22T10:09:59"))
    assert (soon.fire_unix_s, soon.mark) == (None, begun.mark)
    due = check_due(spec, begun.mark, at("2026-11-22T10:10:02"))
    assert (due.fire_unix_s, due.missed) == (at("2026-11-22T10:10:00"), 0)
    late = check_due(spec, due.mark, at("2026-11-22T10:30:30"))
    assert (late.fire_unix_s, late.missed) == (at("2026-11-22T10:30:00"), 3)
    gone = check_due(spec, late.mark, at("2026-11-22T11:04:00"))
    assert (gone.fire_unix_s, gone.missed) == (None, 6)
    other = check_due(scheduled("*/7 * * * *"), due.mark, at("2026-11-22T12:00:00"))
    assert other.fire_unix_s is None


@given(st.integers(0, 10**9), st.lists(st.integers(1, 400), min_size=1, max_size=30))
def test_no_moment_is_fired_twice_nor_late(begin: int, steps: list[int]) -> None:
    spec = scheduled("*/2 * * * *")
    mark, now, fired = None, begin, list[int]()
    for step in steps:
        due = check_due(spec, mark, now)
        if due.fire_unix_s is not None:
            fired.append(due.fire_unix_s)
            assert now - LATE_S <= due.fire_unix_s <= now
        mark = due.mark
        now += step
    assert fired == sorted(set(fired))


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.integers(10**8, 10**9), st.lists(st.integers(-(10**7), 10**7), max_size=5), st.integers(0, 299))
def test_a_clock_that_was_wrong_silences_no_schedule(begin: int, jumps: list[int], offset: int) -> None:
    """Whatever the clock said for a second: once it is right, the schedule fires at its next moment, or the one after
    that if they lie within what clocks may differ by."""
    spec = scheduled("*/5 * * * *")
    mark = None
    for jump in (0, *jumps):
        mark = check_due(spec, mark, max(0, begin + jump)).mark
    fired = []
    for now in range(begin + offset, begin + offset + 300 + LATE_S + 1):
        due = check_due(spec, mark, now)
        mark = due.mark
        if due.fire_unix_s is not None:
            fired.append(due.fire_unix_s)
    assert fired
    assert len(fired) == len(set(fired))


def test_the_mark_is_never_beyond_the_last_moment_that_was_due() -> None:
    spec = scheduled("*/5 * * * *")
    begun = check_due(spec, None, at("2026-11-22T10:05:01"))
    ahead = check_due(spec, begun.mark, at("2027-01-01T00:00:30"))
    assert ahead.mark.looked_unix_s <= at("2027-01-01T00:00:30")
    back = check_due(spec, ahead.mark, at("2026-11-22T10:05:02"))
    assert check_due(spec, back.mark, at("2026-11-22T10:10:00")).fire_unix_s == at("2026-11-22T10:10:00")


SIX = at("2026-11-27T06:00:00")


def fired_each_second(
    redis_url: str, folder: Path, error: FleetError, failing: range, until: int
) -> list[tuple[int, str]]:
    """Fires a daily schedule, due at second 0, at each second from -2 to `until`; `failing` are those in which calls
    are answered with the error. Returns the invocations with their seconds."""
    second = -2

    async def check(*_: Any) -> Version:
        if second in failing and not isinstance(error, StoreFailed):
            raise error
        return Version(1)

    class Failing(FolderStore):
        async def create(self, key: str, data: bytes) -> bool:
            if second in failing and isinstance(error, StoreFailed):
                raise error
            return await super().create(key, data)

    async def fire() -> list[tuple[int, str]]:
        nonlocal second
        spec, view, found = scheduled("0 6 * * *"), View(), list[tuple[int, str]]()
        view.functions[spec.name] = FunctionRecord(name=spec.name, live=Version(1), deployed_unix_ms=0)
        view.versions[VersionKey(spec.name, Version(1))] = VersionRecord(
            version=Version(1), digest="", spec=spec, segment_bytes=0, created_unix_ms=0
        )
        async with redis.from_url(redis_url) as client:
            invocations, payloads = InvocationStore(client), PayloadStore(Failing(folder))
            submitter = AsyncSubmitter(invocations, payloads, check, RedisClock(client))
            schedules = CronScheduler(client, view, submitter, lambda: 1)
            for second in range(-2, until + 1):
                found += [(second, one) for one in await schedules.step(SIX + second)]
        return found

    return asyncio.run(fire())


@pytest.mark.parametrize("error", [StoreFailed("SlowDown"), Unavailable("Redis does not answer")])
def test_a_moment_at_which_the_store_or_redis_failed_is_tried_again_for_a_minute(
    redis_url: str, tmp_path: Path, error: FleetError
) -> None:
    once = schedule_id(scheduled("").name, SIX)
    assert fired_each_second(redis_url, tmp_path, error, range(3), 5) == [(3, once)]


def test_a_moment_that_fails_for_longer_is_missed(redis_url: str, tmp_path: Path) -> None:
    assert not fired_each_second(redis_url, tmp_path, StoreFailed("SlowDown"), range(LATE_S + 1), LATE_S + 2)


def test_a_schedule_that_waits_is_not_searched_for_its_next_moment_every_second(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = list[int]()

    def searched(schedule: str, timezone: str, after_unix_s: int) -> int:
        searches.append(after_unix_s)
        return next_unix_s(schedule, timezone, after_unix_s)

    monkeypatch.setattr(cron_schedules, "next_unix_s", searched)
    once = schedule_id(scheduled("").name, SIX)
    assert fired_each_second(redis_url, tmp_path, StoreFailed("SlowDown"), range(0), 50) == [(0, once)]
    assert len(searches) <= 6


@pytest.mark.parametrize("error", [BudgetSpent("spent"), QueueFull("10,000 wait")])
def test_a_moment_that_is_refused_is_skipped(redis_url: str, tmp_path: Path, error: FleetError) -> None:
    assert not fired_each_second(redis_url, tmp_path, error, range(1), 3)


def test_a_schedule_fires_as_an_async_invocation_and_is_listed(
    controller: ControllerProcess, node: HandNode, calls: Client, redis_server: RedisServer
) -> None:
    controller.deploy("hello", schedule="* * * * *")
    with redis_server.client() as client:
        raw = wait_until(lambda: client.hget(keys.SCHEDULES, "hello"))
        mark = msgspec.json.decode(raw, type=ScheduleMark)
        early = msgspec.structs.replace(mark, looked_unix_s=mark.looked_unix_s - 60)
        client.hset(keys.SCHEDULES, "hello", msgspec.json.encode(early))
    (one,) = wait_until(lambda: calls.listed(function="hello"))
    assert one["origin"] == "schedule"
    ended = calls.until(one["id"], "succeeded")
    assert ended["result"]["headers"]["fs-scheduled-at"] == one["source"]
    (shown,) = controller.http.get("/api/v1/schedules").json()
    assert shown["function"] == "hello"
    assert shown["last"] == one["id"]
    assert shown["status"] == "succeeded"
    assert shown["next_unix_ms"] > shown["last_unix_ms"]
    with redis_server.client() as client:  # what another scheduler would do that had not seen the mark
        client.hset(keys.SCHEDULES, "hello", msgspec.json.encode(early))
        wait_until(lambda: client.hget(keys.SCHEDULES, "hello") != msgspec.json.encode(early))
    assert len(calls.listed(function="hello")) <= 2
    assert sum(len(app.calls) for app in node.apps.values()) == len(calls.listed(function="hello"))
    bad = controller.http.post(
        "/api/v1/functions", json={"name": "bad", "bundle": "0" * 64, "entry": "a:b", "schedule": "99 * * * *"}
    )
    assert bad.status_code == 400
    assert "cron expression" in bad.json()["error"]["message"]


def test_nobody_can_take_the_id_of_a_moment(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    controller.deploy("mine")
    taken = InvocationId("cron-nightly-20301123T020000Z")
    ids = set()
    for prefer in ({"prefer": "respond-async"}, {"idempotency-key": "k"}, {}):
        answer = controller.http.post("/fn/mine/echo", content=b"x", headers={"x-request-id": taken, **prefer})
        assert answer.status_code in (200, 202)
        ids.add(answer.headers["x-request-id"])
    assert taken not in ids
    # The calls are found by the id that their caller gave, as soon as they are booked, and keep their own.
    url = f"/api/v1/invocations/{taken}"
    found = wait_until(lambda: [answer for answer in [controller.http.get(url)] if answer.status_code == 200])
    assert found[0].json()["row"]["id"] in ids
    with redis_server.client() as client:
        assert not client.exists(keys.invocation(taken), keys.trace(taken))


def test_the_id_of_a_moment_is_always_the_same() -> None:
    one = schedule_id(FunctionName("report"), at("2026-11-22T10:10:00"))
    assert one == "cron-report-20261122T101000Z"
