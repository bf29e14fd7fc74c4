"""Backends of versions: slots, the order of the queue, backoff of workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from fleetstart.controller.gateway.dispatch.queue import CallQueue
from fleetstart.controller.gateway.dispatch.version_backend import Attempt, Call, QueuedCall, VersionBackend
from fleetstart.controller.state.records import VersionKey, VersionRecord
from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerState, WorkerStatus
from tests.controller.scheduler.test_autoscaler import spec

KEY = VersionKey(FunctionName("f"), Version(1))
MS = 1_000_000


def call(name: str, *, accepted_ns: int = 0, accepted_unix_ns: int = 0) -> Call:
    return Call(
        id=InvocationId(name), method="GET", target="/", headers=[], body=b"", accepted_ns=accepted_ns,
        accepted_unix_ns=accepted_unix_ns, deadline_ns=1000 * MS,
    )  # fmt: skip


def queued(name: str) -> QueuedCall:
    """A queued call outside of an event loop: no slot is assigned to it."""
    return QueuedCall(call(name), cast("asyncio.Future[Attempt]", None))


def backend(concurrency: int = 1, elsewhere: Callable[[WorkerId], int] = lambda _: 0) -> VersionBackend:
    record = VersionRecord(
        version=Version(1), digest="", spec=spec(concurrency=concurrency), segment_bytes=0, created_unix_ms=0
    )
    return VersionBackend(KEY, record, elsewhere=elsewhere, later=lambda *_: None)


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
    version = backend(concurrency=2, elsewhere=lambda worker: {"a": 1}.get(worker, 0))
    version.on_status(status("a"), 0)
    version.on_status(status("b"), 0)
    seats = [version.try_acquire(call(str(i)), 0) for i in range(4)]
    assert [attempt.worker.id if attempt else None for attempt in seats] == ["b", "a", "b", None]


def test_a_slot_goes_to_the_one_who_waits_longest() -> None:
    def test() -> None:
        version = backend()
        version.on_status(status("a"), 0)
        first, second, third = call("1"), call("2"), call("3")
        attempt = version.try_acquire(first, 0)
        turns: list[Any] = [version.enqueue(second), version.enqueue(third)]
        assert attempt is not None
        assert version.try_acquire(call("4"), 0) is None, "nobody passes the queue"
        assert version.release(attempt, 5 * MS, waive=False) == 5
        assert [turn.slot.done() for turn in turns] == [True, False]
        version.on_status(status("b"), 5 * MS)
        assert turns[1].slot.done()

    in_loop(test)


def test_a_worker_that_drains_keeps_its_calls_and_gets_no_more() -> None:
    version = backend(concurrency=2)
    version.on_status(status("a"), 0)
    first = version.try_acquire(call("1"), 0)
    assert first is not None
    version.on_status(status("a", "draining"), 0)
    assert version.try_acquire(call("2"), 0) is None
    assert version.running == 1
    assert version.load(time.monotonic_ns()).per_worker == {"a": 1}
    assert version.release(first, 3 * MS, waive=False) == 3
    assert version.idle


def test_one_that_is_avoided_comes_back() -> None:
    version = backend()
    version.on_status(status("a"), 0)
    attempt = version.try_acquire(call("1"), 0)
    assert attempt is not None
    version.avoid(attempt.worker, 0, 10 * MS)
    version.release(attempt, 0, waive=True)
    assert version.try_acquire(call("2"), 5 * MS) is None
    again = version.try_acquire(call("2"), 10 * MS)
    assert again is not None
    assert again.worker is attempt.worker


def test_a_full_queue_takes_no_more() -> None:
    def test() -> None:
        version = backend()
        version.queue = CallQueue(limit=2)
        version.on_status(status("a"), 0)
        assert version.has_free_slot(0)
        assert version.try_acquire(call("0"), 0)
        assert not version.has_free_slot(0)
        assert version.enqueue(call("1"))
        assert version.enqueue(call("2"))
        assert version.enqueue(call("3")) is None

    in_loop(test)


def test_a_call_that_its_deadline_ended_took_all_the_time_that_it_had() -> None:
    """A call that counted with a little less would leave later ones next to no time to wait: they would be refused."""
    for ended_ns, took_s in ((1000 * MS, 1.0), (999 * MS, 0.899)):
        version = backend()
        version.on_status(status("a"), 0)
        attempt = version.try_acquire(call("1", accepted_ns=0), 100 * MS)
        assert attempt is not None
        version.release(attempt, ended_ns, waive=False)
        assert version.service_time.mean_s == pytest.approx(took_s)


def test_slots_that_are_taken_are_counted_with_the_others_calls() -> None:
    version = backend(concurrency=4, elsewhere=lambda _: 1)
    version.on_status(status("a"), 0)
    version.service_time.observe(0.5)
    version.try_acquire(call("1"), 0)
    version.try_acquire(call("2"), 100 * MS)
    assert version.slots == 4
    count, elapsed_s = version.slots_in_use(200 * MS)
    assert count == 3
    assert elapsed_s == pytest.approx(0.2 + 0.1 + 0.25)


def test_a_slot_that_comes_as_the_wait_ends_is_free_again_and_not_billed() -> None:
    def test() -> None:
        version = backend()
        waiting = version.enqueue(call("1"))
        assert waiting is not None
        version.on_status(status("a"), 0)
        assert waiting.slot.done()
        version.withdraw(waiting, 5 * MS)
        assert version.idle
        assert version.has_free_slot(5 * MS)

    in_loop(test)


def test_who_was_turned_away_counts_as_demand_until_it_is_told() -> None:
    version = backend()
    version.record_rejected()
    assert (version.load(time.monotonic_ns()).running, version.load(time.monotonic_ns()).recent, version.running) == (
        1,
        1,
        0,
    )


def test_failing_ends_the_waiting_of_the_older_only() -> None:
    def test() -> None:
        version = backend()
        old, young = call("old"), call("young", accepted_ns=10)
        turns: list[Any] = [version.enqueue(old), version.enqueue(young)]
        version.fail_waiting(Unavailable("no room"), 5)
        assert isinstance(turns[0].slot.exception(), Unavailable)
        assert not turns[1].slot.done()
        assert len(version.queue) == 1

    in_loop(test)


def test_a_worker_that_says_for_long_that_it_is_full_counts_as_busy() -> None:
    """An app may work on after its answer: without that no other worker would be started for the calls that wait."""

    def running(version: VersionBackend, at_ms: int) -> int:
        version.peak = 0
        return version.load(at_ms * MS).running

    version = backend(concurrency=2, elsewhere=lambda _: 0)
    version.on_status(status("a"), 0)
    (worker,) = version.workers.values()
    for at_ms in (100, 300, 590):
        version.note_full(worker, at_ms * MS)
        assert running(version, at_ms) == 0, "another gateway's call may explain it, whose report comes"
    version.note_full(worker, 600 * MS)
    assert running(version, 600) == 2
    assert running(version, 1601) == 0, "nobody asks it any more"
    version.note_full(worker, 1700 * MS)
    assert running(version, 1700) == 0
    version.note_full(worker, 2300 * MS)
    assert running(version, 2300) == 2
    attempt = version.try_acquire(call("1"), 2300 * MS)
    assert attempt is not None
    version.release(attempt, 2301 * MS, waive=False)
    assert running(version, 2302) == 0, "it has served a call"


def test_a_short_peak_is_not_forgotten_between_reports() -> None:
    version = backend(concurrency=4)
    version.on_status(status("a"), 0)
    attempts = [version.try_acquire(call(str(i)), 0) for i in range(3)]
    for one in attempts:
        assert one is not None
        version.release(one, 1, waive=False)
    assert (version.load(time.monotonic_ns()).running, version.running) == (3, 0)
    version.peak = 0
    assert version.load(time.monotonic_ns()).running == 0


def test_a_stage_that_helps_another_gets_no_calls_until_it_has_grown() -> None:
    version = backend()
    stage = msgspec.structs.replace(status("a"), endpoint="", whole=False)
    version.on_status(stage, 0)
    assert version.try_acquire(call("1"), 1) is None
    version.on_status(msgspec.structs.replace(stage, endpoint="127.0.0.1:1", whole=True), 2)
    assert version.try_acquire(call("2"), 3) is not None
