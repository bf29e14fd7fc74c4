"""Recent activity of each function: calls, latencies, cold starts, cost. Pure.

Rows of the ledger are folded in once each, in buckets of some seconds; old buckets fall out. So it says the same on
every controller, and after a restart, and costs nothing while it is not read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from fleetstart.runtime.contract.billing.ledger import InvocationRow
from fleetstart.runtime.contract.ids import FunctionName

from ..billing.archive_format import LedgerEntry
from .latency_sketch import bucket_index, quantile

BUCKET_MS = 10_000
WINDOW_MS = 300_000


class FunctionActivity(msgspec.Struct, frozen=True, kw_only=True):
    """Activity of one function in the last `window_s` seconds; `cost_today_nusd` is of the day."""

    function: FunctionName
    calls: int = 0
    calls_per_min: float = 0.0
    failed: int = 0
    """Answered with a status of 500 or more, or given up by their callers."""
    refused: int = 0
    """Answered with 4xx."""
    waited: int = 0
    """Calls that waited for a worker's start, warm or cold."""
    cold: int = 0
    """Calls whose start fetched weights."""
    p50_ms: float | None = None
    p99_ms: float | None = None
    """Time from acceptance to the complete response; None without calls."""
    first_byte_p50_ms: float | None = None
    first_byte_p99_ms: float | None = None
    cost_nusd: int = 0
    cost_today_nusd: int = 0
    """UTC."""
    by_bucket: list[int] = []
    """Calls, the oldest bucket first."""


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    window_s: int
    bucket_s: int
    functions: list[FunctionActivity]


@dataclass(slots=True)
class _Bucket:
    calls: int = 0
    failed: int = 0
    refused: int = 0
    waited: int = 0
    cold: int = 0
    cost_nusd: int = 0
    total: Counter[int] = field(default_factory=Counter)
    first: Counter[int] = field(default_factory=Counter)


class ActivityWindow:
    """The activity window: rows in, sums out. A row counts to the time at which it was booked."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[int, dict[FunctionName, _Bucket]] = OrderedDict()

    def add(self, entries: Iterable[LedgerEntry]) -> None:
        for entry in entries:
            if isinstance(entry.row, InvocationRow):
                functions = self._buckets.setdefault(entry.id.unix_ms // BUCKET_MS, {})
                _count(functions.setdefault(entry.row.function, _Bucket()), entry.row)

    def result(self, now_unix_ms: int, today_nusd: dict[FunctionName, int]) -> Activity:
        last = now_unix_ms // BUCKET_MS
        first = last - WINDOW_MS // BUCKET_MS + 1
        for number in [number for number in self._buckets if number < first]:
            del self._buckets[number]
        names = sorted({name for functions in self._buckets.values() for name in functions} | today_nusd.keys())
        return Activity(
            window_s=WINDOW_MS // 1000,
            bucket_s=BUCKET_MS // 1000,
            functions=[self._function(name, range(first, last + 1), today_nusd.get(name, 0)) for name in names],
        )

    def _function(self, name: FunctionName, numbers: range, today_nusd: int) -> FunctionActivity:
        empty = _Bucket()
        buckets = [self._buckets.get(number, {}).get(name, empty) for number in numbers]
        total, first = Counter[int](), Counter[int]()
        for bucket in buckets:
            total.update(bucket.total)
            first.update(bucket.first)
        calls = sum(bucket.calls for bucket in buckets)
        return FunctionActivity(
            function=name,
            calls=calls,
            calls_per_min=calls * 60_000 / WINDOW_MS,
            failed=sum(bucket.failed for bucket in buckets),
            refused=sum(bucket.refused for bucket in buckets),
            waited=sum(bucket.waited for bucket in buckets),
            cold=sum(bucket.cold for bucket in buckets),
            p50_ms=quantile(total, 0.5),
            p99_ms=quantile(total, 0.99),
            first_byte_p50_ms=quantile(first, 0.5),
            first_byte_p99_ms=quantile(first, 0.99),
            cost_nusd=sum(bucket.cost_nusd for bucket in buckets),
            cost_today_nusd=today_nusd,
            by_bucket=[bucket.calls for bucket in buckets],
        )


def _count(bucket: _Bucket, row: InvocationRow) -> None:
    bucket.calls += 1
    bucket.cost_nusd += row.cost_nusd
    if has_failed(row):
        bucket.failed += 1
    elif row.status >= 400:
        bucket.refused += 1
    if row.worker and row.start != "hot":
        bucket.waited += 1
        bucket.cold += row.start == "cold"
    bucket.total[bucket_index(row.total_ms)] += 1
    if row.first_byte_ms is not None:
        bucket.first[bucket_index(row.first_byte_ms)] += 1


def has_failed(row: InvocationRow) -> bool:
    """Checks whether the call was answered with a status of 500 or more, or given up by its caller."""
    return row.status >= 500 or row.status == 499
