"""A call's record: the start that it waited for on its timeline, and when its first attempt is reported."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from fleetstart.controller.billing.ledger_writer import LedgerWriter
from fleetstart.controller.gateway.dispatch.call_record import CallRecorder
from fleetstart.controller.gateway.dispatch.start_phases import add_start_phases
from fleetstart.controller.state.view import View
from fleetstart.runtime.contract.billing.ledger import InvocationTrace, cost_nusd
from fleetstart.runtime.contract.billing.prices import FIRST
from fleetstart.runtime.contract.errors import DeadlineExceeded
from fleetstart.runtime.contract.ids import NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.timeline import Timeline
from tests.controller.gateway.dispatch.test_version_backend import backend, call, status
from tests.controller.scheduler.test_autoscaler import spec

MS = 1_000_000


@pytest.mark.parametrize(("decided_ms", "placed_ms"), [(3, [3.0]), (0, [250.0]), (-40, [])])
def test_placing_ends_when_the_start_was_decided_whenever_its_order_was_written_last(
    decided_ms: int, placed_ms: list[float]
) -> None:
    """Without a time of decision the order's time counts. A start from before the call is not on its timeline."""
    unix_ns = 1_000_000 * MS
    accepted, timeline = call("a", accepted_unix_ns=unix_ns), Timeline()
    order = WorkerOrder(
        worker=WorkerId("w"), node=NodeId("n"), epoch="e", version=Version(1), spec=spec(),
        ordered_unix_ns=unix_ns + 250 * MS, decided_unix_ns=unix_ns + decided_ms * MS if decided_ms else 0,
    )  # fmt: skip
    add_start_phases(timeline, accepted, status("w"), order, 0)
    assert [phase.duration_ms for phase in timeline.phases if phase.name == "place"] == placed_ms


def test_the_first_call_of_a_version_that_was_reported_idle_is_reported_at_once() -> None:
    """Else its worker could be drained under a call: periodic reports are further apart than a short keep-alive."""
    demands: list[str] = []
    ledger = cast(LedgerWriter, SimpleNamespace(opened=lambda _: None))
    recorder = CallRecorder("gw", View(), ledger, report_now=lambda: demands.append("now"), report_soon=lambda: None)
    version = backend(concurrency=4)
    version.on_status(status("a"), 0)

    def start(name: str) -> None:
        record = recorder.open(version, call(name))
        attempt = version.try_acquire(record.call, 0)
        assert attempt is not None
        record.start_attempt(attempt)

    assert version.load(time.monotonic_ns()).running == 0
    start("1")
    assert demands == ["now"]
    assert version.load(time.monotonic_ns()).running == 1
    start("2")
    assert demands == ["now"], "the schedulers know that the version has calls"


def test_a_worker_that_refused_a_call_is_no_attempt() -> None:
    """A handler would take the next one for a repetition, and a worker that is full may refuse it hundreds of times."""
    ledger = cast(LedgerWriter, SimpleNamespace(opened=lambda _: None))
    recorder = CallRecorder("gw", View(), ledger, report_now=lambda: None, report_soon=lambda: None)
    version = backend()
    version.on_status(status("a"), 0)
    record = recorder.open(version, call("1"))
    for at_ns in range(0, 100 * MS, 20 * MS):
        attempt = version.try_acquire(record.call, time.monotonic_ns() + at_ns + 1000 * MS)
        assert attempt is not None
        record.start_attempt(attempt)
        assert record.number == 1
        record.release_refused(attempt)
    assert (record.number, record.trace(time.monotonic_ns()).row.attempts) == (0, 0)


def test_a_call_costs_the_memory_of_its_worker_and_of_its_devices() -> None:
    ledger = cast(LedgerWriter, SimpleNamespace(opened=lambda _: None))
    recorder = CallRecorder("gw", View(), ledger, report_now=lambda: None, report_soon=lambda: None)
    version = backend()
    version.on_status(msgspec.structs.replace(status("a"), device_type="H100", device_bytes=2 << 30), 0)
    price = msgspec.structs.replace(FIRST, device_nusd_per_gib_s={"H100": 1000})
    record = recorder.open(version, replace(call("1"), price=price))
    attempt = version.try_acquire(record.call, 0)
    assert attempt is not None
    record.start_attempt(attempt)
    record.billed_ms = 3000
    row = record.trace(time.monotonic_ns()).row
    host = cost_nusd(3000, version.spec.memory_bytes, FIRST.execute_nusd_per_gib_s)
    assert row.cost_nusd == record.cost_nusd == host + 3 * 2 * 1000
    assert (row.device_type, row.device_bytes, row.device_rate_nusd_per_gib_s) == ("H100", 2 << 30, 1000)


@pytest.mark.parametrize("left", [False, True])
def test_the_time_of_a_call_without_an_answer_is_on_its_timeline(left: bool) -> None:
    """Else a function whose calls all run until their time is up would be said to answer within a millisecond."""
    traces: list[InvocationTrace] = []
    ledger = cast(
        LedgerWriter, SimpleNamespace(opened=lambda _: None, ended=lambda trace, outcome: traces.append(trace))
    )
    recorder = CallRecorder("gw", View(), ledger, report_now=lambda: None, report_soon=lambda: None)
    version = backend()
    version.on_status(status("a"), 0)
    now_ns = time.monotonic_ns()
    record = recorder.open(version, call("1", accepted_ns=now_ns - 7 * 1000 * MS))
    attempt = version.try_acquire(record.call, now_ns - 5 * 1000 * MS)
    assert attempt is not None
    record.start_attempt(attempt)
    if left:
        record.set_outcome(499, "client_gone")
        record.release(waive=False)
        record.finish()
    else:
        record.fail(DeadlineExceeded("its time is up"))
    (trace,) = traces
    assert {phase.name: round(phase.duration_ms / 1000) for phase in trace.timeline.phases} == {
        "queue": 2,
        "execute": 5,
    }
    assert trace.row.first_byte_ms is None
    assert trace.row.billed_ms >= 5000
    assert recorder.open(version, call("2")).start_outcome() is None
