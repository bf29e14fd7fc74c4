"""Call metrics: each call is counted once, failed ones too, in a bounded number of series."""

from __future__ import annotations

from typing import Any

from fleetstart.controller.observability.call_metrics import SERIES_MAX, CallMetrics, tier_of
from fleetstart.controller.observability.prometheus import Sample
from fleetstart.runtime.contract.billing.ledger import InvocationRow, InvocationTrace
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version, WorkerId
from fleetstart.runtime.contract.timeline import PhaseName, Timeline

MS = 1_000_000


def trace(
    name: str = "f", *phases: tuple[PhaseName, int, int], fetched: dict[str, int] | None = None, **row: Any
) -> InvocationTrace:
    timeline = Timeline()
    for phase, begin_ms, end_ms in phases:
        timeline.add(phase, begin_ms * MS, end_ms * MS)
    first_byte_ms = next((end_ms for phase, _, end_ms in phases if phase == "execute"), None)
    known = {"status": 200, "billed_ms": 0, "cost_nusd": 0, "version": Version(1), "first_byte_ms": first_byte_ms}
    fields: dict[str, Any] = {**known, **row}
    return InvocationTrace(
        row=InvocationRow(
            id=InvocationId("inv-1"), function=FunctionName(name), accepted_unix_ms=0, queue_ms=0, memory_bytes=0,
            **fields,
        ),
        timeline=timeline,
        fetched=fetched or {},
    )  # fmt: skip


def samples(calls: CallMetrics, name: str, functions: set[str] | None = None) -> list[Sample]:
    known = {FunctionName(one) for one in functions} if functions is not None else None
    return next(family.samples for family in calls.families(known) if family.name == f"fleetstart_{name}")


def value(found: list[Sample], suffix: str = "", **labels: str) -> float:
    return next(s.value for s in found if s.suffix == suffix and labels.items() <= dict(s.labels).items())


def test_calls_failures_and_money_are_counted() -> None:
    calls = CallMetrics()
    calls.ended(trace(start="cold", worker=WorkerId("w"), billed_ms=5, cost_nusd=7))
    calls.ended(trace(billed_ms=1, cost_nusd=2))
    calls.ended(trace(status=502, error="worker_lost", attempts=3))
    calls.refused("queue_full")
    ended = samples(calls, "invocations_total")
    assert value(ended, status="200", start="cold", version="1") == 1
    assert value(ended, status="502") == 1
    assert value(samples(calls, "invocation_errors_total"), code="worker_lost") == 1
    assert value(samples(calls, "invocation_retries_total")) == 2
    assert value(samples(calls, "billed_milliseconds_total")) == 6
    assert value(samples(calls, "cost_dollars_total")) == 9e-9
    assert value(samples(calls, "refusals_total"), code="queue_full") == 1


def test_times_come_from_the_one_timeline() -> None:
    calls = CallMetrics()
    waited: tuple[tuple[PhaseName, int, int], ...] = (
        ("queue", 100, 900), ("fetch", 150, 800), ("load", 200, 890), ("execute", 900, 1000), ("respond", 1000, 1600)
    )  # fmt: skip
    calls.ended(trace("f", *waited, start="cold", worker=WorkerId("w"), fetched={"disk": 10, "store": 90}))
    assert value(samples(calls, "invocation_seconds"), "_sum", start="cold") == 1.5
    assert value(samples(calls, "first_byte_seconds"), "_sum", start="cold") == 0.9
    phases = samples(calls, "cold_start_seconds")
    assert value(phases, "_sum", phase="fetch", tier="store", start="cold") == 0.65
    assert value(phases, "_bucket", phase="fetch", le="0.5") == 0
    assert value(phases, "_bucket", phase="fetch", le="1") == 1


def test_a_hot_call_is_no_cold_start_and_a_failed_one_has_no_first_byte() -> None:
    calls = CallMetrics()
    calls.ended(trace("f", ("queue", 0, 1), ("execute", 1, 2)))
    calls.ended(trace("f", ("queue", 0, 5), status=504, start="cold"))
    assert samples(calls, "cold_start_seconds") == []
    assert value(samples(calls, "first_byte_seconds"), "_count") == 1


def test_a_call_whose_time_was_up_lasted_as_long_as_it_ran_and_has_no_first_byte() -> None:
    calls = CallMetrics()
    calls.ended(trace("f", ("execute", 1, 5001), ("queue", 0, 1), status=504, first_byte_ms=None))
    assert value(samples(calls, "invocation_seconds"), "_sum", function="f") == 5.001
    assert samples(calls, "first_byte_seconds") == []


def test_the_number_of_series_is_bounded() -> None:
    calls = CallMetrics()
    for number in range(SERIES_MAX + 50):
        calls.ended(trace(f"f{number}"))
    ended = samples(calls, "invocations_total")
    assert len(ended) == SERIES_MAX + 1
    assert value(ended, function="other") == 50
    assert sum(sample.value for sample in ended) == SERIES_MAX + 50


def test_functions_that_were_removed_are_dropped() -> None:
    calls = CallMetrics()
    calls.ended(trace("kept"))
    calls.ended(trace("gone", ("queue", 0, 1)))
    assert {dict(s.labels)["function"] for s in samples(calls, "invocations_total", {"kept"})} == {"kept"}
    assert samples(calls, "invocation_seconds") == []


def test_the_tier_is_where_most_bytes_came_from() -> None:
    assert tier_of({}) == "host"
    assert tier_of({"disk": 0}) == "host"
    assert tier_of({"disk": 1, "store": 2}) == "store"
