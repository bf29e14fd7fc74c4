"""A gateway's memory of one version: slots, turns, and who is passed over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fleetstart.controller.gateway.dispatch.backend import Call, Route
from fleetstart.controller.gateway.dispatch.queue import Queue
from fleetstart.controller.state.records import VersionKey, VersionRecord
from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerState, WorkerStatus
from tests.controller.scheduler.test_autoscaler import spec

KEY = VersionKey(FunctionName("f"), Version(1))
MS = 1_000_000


def call(name: str, deadline_ns: int = 1000 * MS) -> Call:
    return Call(
        id=InvocationId(name), method="GET", target="/", headers=[], body=b"", accepted_ns=0, accepted_unix_ns=0,
        deadline_ns=deadline_ns,
    )  # fmt: skip


def route(concurrency: int = 1, elsewhere: Callable[[WorkerId], int] = lambda _: 0) -> Route:
    record = VersionRecord(
        version=Version(1), digest="", spec=spec(concurrency=concurrency), segment_bytes=0, created_unix_ms=0
    )
    return Route(KEY, record, elsewhere=elsewhere, later=lambda *_: None)


def status(name: str, state: WorkerState = "ready") -> WorkerStatus:
    return WorkerStatus(
        worker=WorkerId(name),
        node=NodeId("n"),
        function=KEY.name,
        version=KEY.version,
        state=state,
        endpoint="127.0.0.1:1" if state == "ready" else "",
    )


def in_loop(test: Callable[[], None]) -> None:
    async def run() -> None:
        test()

    asyncio.run(run())


def test_the_least_loaded_worker_gets_the_call() -> None:
    r = route(concurrency=2, elsewhere=lambda worker: {"a": 1}.get(worker, 0))
    r.heard(status("a"), 0)
    r.heard(status("b"), 0)
    seats = [r.take(call(str(i)), 0) for i in range(4)]
    assert [worker.id if worker else None for worker in seats] == ["b", "a", "b", None]


def test_a_slot_goes_to_the_one_who_waits_longest() -> None:
    def test() -> None:
        r = route()
        r.heard(status("a"), 0)
        first, second, third = call("1"), call("2"), call("3")
        assert r.take(first, 0)
        turns: list[Any] = [r.wait(second), r.wait(third)]
        assert r.take(call("4"), 0) is None, "nobody passes the queue"
        assert r.leave(first, 5 * MS, waive=False) == 5
        assert [turn.done() for turn in turns] == [True, False]
        r.heard(status("b"), 5 * MS)
        assert turns[1].done()

    in_loop(test)


def test_a_worker_that_drains_keeps_its_calls_and_gets_no_more() -> None:
    r = route(concurrency=2)
    r.heard(status("a"), 0)
    first = call("1")
    assert r.take(first, 0)
    r.heard(status("a", "draining"), 0)
    assert r.take(call("2"), 0) is None
    assert r.running == 1
    assert r.load().per_worker == {"a": 1}
    assert r.leave(first, 3 * MS, waive=False) == 3
    assert r.idle


def test_one_that_is_avoided_comes_back() -> None:
    r = route()
    r.heard(status("a"), 0)
    worker = r.take(call("1"), 0)
    assert worker is not None
    r.avoid(worker, 0, 10 * MS)
    r.leave(next(iter(worker.calls)), 0, waive=True)
    assert r.take(call("2"), 5 * MS) is None
    assert r.take(call("2"), 10 * MS) is worker


def test_a_full_queue_takes_no_more() -> None:
    def test() -> None:
        r = route()
        r.queue = Queue(limit=2)
        r.heard(status("a"), 0)
        assert r.has_room(0)
        assert r.take(call("0"), 0)
        assert not r.has_room(0)
        assert r.wait(call("1"))
        assert r.wait(call("2"))
        assert r.wait(call("3")) is None

    in_loop(test)


def test_slots_that_are_taken_are_counted_with_the_others_calls() -> None:
    r = route(concurrency=4, elsewhere=lambda _: 1)
    r.heard(status("a"), 0)
    r.service_time.observe(0.5)
    r.take(call("1"), 0)
    r.take(call("2"), 100 * MS)
    assert r.slots == 4
    count, elapsed_s = r.taken(200 * MS)
    assert count == 3
    assert elapsed_s == pytest.approx(0.2 + 0.1 + 0.25)


def test_who_was_turned_away_counts_as_demand_until_it_is_told() -> None:
    r = route()
    r.missed()
    assert (r.load().running, r.load().arrived, r.running) == (1, 1, 0)


def test_failing_ends_the_waiting_of_the_older_only() -> None:
    def test() -> None:
        r = route()
        old, young = call("old"), call("young")
        young.accepted_ns = 10
        turns: list[Any] = [r.wait(old), r.wait(young)]
        r.fail(Unavailable("no room"), 5)
        assert isinstance(turns[0].exception(), Unavailable)
        assert not turns[1].done()
        assert len(r.queue) == 1

    in_loop(test)


def test_a_short_peak_is_not_forgotten_between_reports() -> None:
    r = route(concurrency=4)
    r.heard(status("a"), 0)
    calls = [call(str(i)) for i in range(3)]
    for one in calls:
        r.take(one, 0)
    for one in calls:
        r.leave(one, 1, waive=False)
    assert (r.load().running, r.running) == (3, 0)
    r.peak = 0
    assert r.load().running == 0


def test_a_stage_that_helps_another_gets_no_calls_until_it_has_grown() -> None:
    r = route()
    stage = msgspec.structs.replace(status("a"), endpoint="", whole=False)
    r.heard(stage, 0)
    assert r.take(call("1"), 1) is None
    r.heard(msgspec.structs.replace(stage, endpoint="127.0.0.1:1", whole=True), 2)
    assert r.take(call("2"), 3) is not None
