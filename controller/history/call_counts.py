"""Counts of calls that merge: those of a minute from several gateways, those of an hour from its minutes. Pure.

Merging adds up every count, so the counts of some calls are the same however the calls were divided.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fleetstart.runtime.contract.billing.ledger import InvocationRow

from ..observability.activity import has_failed
from ..observability.latency_sketch import bucket_index, quantile
from ..schemas.history import HistoryPoint


class CallCounts(msgspec.Struct, array_like=True):
    """Counts of some calls, mutable. Encoded as an array, so fields are only ever added at the end."""

    calls: int = 0
    failed: int = 0
    refused: int = 0
    warm: int = 0
    cold: int = 0
    cost_nusd: int = 0
    total_ms: dict[int, int] = {}
    """Sketch of the time from acceptance to the complete response."""
    wait_ms: dict[int, int] = {}
    """Sketch of the time that calls waited for a start."""

    def add(self, row: InvocationRow) -> None:
        self.calls += 1
        self.cost_nusd += row.cost_nusd
        self.failed += has_failed(row)
        self.refused += 400 <= row.status < 499
        _count(self.total_ms, bucket_index(row.total_ms), 1)
        if row.worker and row.start != "hot":
            self.warm += row.start in ("standby", "warm")
            self.cold += row.start == "cold"
            _count(self.wait_ms, bucket_index(row.queue_ms), 1)

    def merge(self, other: CallCounts) -> None:
        """Adds the other counts to these."""
        self.calls += other.calls
        self.failed += other.failed
        self.refused += other.refused
        self.warm += other.warm
        self.cold += other.cold
        self.cost_nusd += other.cost_nusd
        for mine, others in ((self.total_ms, other.total_ms), (self.wait_ms, other.wait_ms)):
            for index, count in others.items():
                _count(mine, index, count)

    def point(self, begin_unix_ms: int) -> HistoryPoint:
        return HistoryPoint(
            begin_unix_ms=begin_unix_ms,
            calls=self.calls,
            failed=self.failed,
            refused=self.refused,
            warm=self.warm,
            cold=self.cold,
            cost_nusd=self.cost_nusd,
            p50_ms=quantile(self.total_ms, 0.5),
            p95_ms=quantile(self.total_ms, 0.95),
            wait_p50_ms=quantile(self.wait_ms, 0.5),
        )


def merged(parts: Iterable[CallCounts]) -> CallCounts:
    whole = CallCounts()
    for part in parts:
        whole.merge(part)
    return whole


def encode(counts: CallCounts) -> bytes:
    return msgspec.msgpack.encode(counts)


def decode(data: bytes) -> CallCounts:
    """Errors: msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=CallCounts)


def _count(sketch: dict[int, int], index: int, count: int) -> None:
    sketch[index] = sketch.get(index, 0) + count
