"""The activity window, as sums of the ledger's rows."""

from __future__ import annotations

from typing import Any

from fleetstart.controller.billing.archive_format import EntryId, LedgerEntry
from fleetstart.controller.observability.activity import BUCKET_MS, WINDOW_MS, ActivityWindow
from fleetstart.runtime.contract.billing.ledger import InvocationRow
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version, WorkerId

NOW_MS = 1_800_000_000_000


def entry(unix_ms: int, name: str = "f", *, status: int = 200, worker: str = "w", **fields: Any) -> LedgerEntry:
    row = InvocationRow(
        id=InvocationId("i"), function=FunctionName(name), version=Version(1), worker=WorkerId(worker), status=status,
        accepted_unix_ms=unix_ms, queue_ms=0, billed_ms=0, memory_bytes=0, cost_nusd=3, **fields,
    )  # fmt: skip
    return LedgerEntry(EntryId(unix_ms, 0), b"", row)


def test_what_is_older_than_the_window_falls_out() -> None:
    recent = ActivityWindow()
    recent.add([entry(NOW_MS - WINDOW_MS - BUCKET_MS), entry(NOW_MS - BUCKET_MS), entry(NOW_MS)])
    (seen,) = recent.result(NOW_MS, {}).functions
    assert (seen.calls, seen.by_bucket[-2:], sum(seen.by_bucket)) == (2, [1, 1], 2)
    assert recent.result(NOW_MS + 2 * WINDOW_MS, {}).functions == []


def test_failures_refusals_and_starts_are_told_apart() -> None:
    recent = ActivityWindow()
    recent.add(
        [
            entry(NOW_MS, start="cold", total_ms=100, first_byte_ms=80), entry(NOW_MS, start="warm", total_ms=8),
            entry(NOW_MS, total_ms=1), entry(NOW_MS, status=500), entry(NOW_MS, status=499),
            entry(NOW_MS, status=429, start="cold", worker=""),
        ]
    )  # fmt: skip
    (seen,) = recent.result(NOW_MS, {FunctionName("f"): 42}).functions
    assert (seen.calls, seen.failed, seen.refused, seen.waited, seen.cold) == (6, 2, 1, 2, 1)
    assert (seen.cost_nusd, seen.cost_today_nusd) == (18, 42)
    assert seen.first_byte_p50_ms is not None
    assert 80 <= seen.first_byte_p50_ms <= 100


def test_a_function_that_nobody_called_has_its_cost_of_today() -> None:
    (seen,) = ActivityWindow().result(NOW_MS, {FunctionName("kept"): 7}).functions
    assert (seen.function, seen.calls, seen.p50_ms, seen.cost_today_nusd) == ("kept", 0, None, 7)
