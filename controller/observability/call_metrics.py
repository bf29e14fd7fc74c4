"""Metrics of this gateway's own calls, counted as each ends: a few additions a call, no I/O.

Labels come from what is deployed and from closed lists, never from a request; beyond `SERIES_MAX` combinations of a
family, new ones count as "other". Functions that were removed are dropped when the metrics are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable
from typing import Any, Generic, TypeVar

from fleetstart.runtime.contract.billing.ledger import InvocationTrace
from fleetstart.runtime.contract.ids import FunctionName
from fleetstart.runtime.contract.timeline import Phase

from .prometheus import Histogram, MetricFamily

SERIES_MAX = 2000
CALL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
START_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
OTHER = "other"

Key = TypeVar("Key", bound=Hashable)


class CallMetrics:
    """Counters of one gateway. They begin with the process."""

    def __init__(self) -> None:
        self._ended: defaultdict[tuple[str, str, int, str], int] = defaultdict(int)
        self._errors: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._attempts: defaultdict[str, int] = defaultdict(int)
        self._money: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        """Billed milliseconds and nano-dollars."""
        self._lasted = _Histograms[tuple[str, str]](CALL_S)
        self._first_byte = _Histograms[tuple[str, str]](CALL_S)
        self._phases = _Histograms[tuple[str, str, str]](START_S)
        self._refused: defaultdict[str, int] = defaultdict(int)

    def refused(self, code: str) -> None:
        self._refused[_within(self._refused, code, OTHER)] += 1

    def ended(self, trace: InvocationTrace) -> None:
        row = trace.row
        name = row.function
        full = (name, str(row.version), row.status, row.start)
        self._ended[_within(self._ended, full, (OTHER, "0", row.status, row.start))] += 1
        if row.error:
            self._errors[_within(self._errors, (name, row.error), (OTHER, OTHER))] += 1
        if row.attempts > 1:
            self._attempts[_within(self._attempts, name, OTHER)] += row.attempts - 1
        money = self._money[_within(self._money, name, OTHER)]
        money[0] += row.billed_ms
        money[1] += row.cost_nusd
        phases = trace.timeline.phases
        if phases:
            self._observe(trace, phases)

    def _observe(self, trace: InvocationTrace, phases: list[Phase]) -> None:
        row = trace.row
        begun_ns = min(phase.started_ns for phase in phases)
        key, other = (row.function, row.start), (OTHER, row.start)
        self._lasted.observe(key, other, (max(phase.ended_ns for phase in phases) - begun_ns) / 1e9)
        first_ns = next((phase.ended_ns for phase in phases if phase.name == "execute"), 0)
        if first_ns and row.first_byte_ms is not None:  # else it ran, and had no answer
            self._first_byte.observe(key, other, (first_ns - begun_ns) / 1e9)
        if row.start != "hot" and row.worker:
            tier = tier_of(trace.fetched)
            for name in dict.fromkeys(phase.name for phase in phases):
                seconds = trace.timeline.total_ms(name) / 1000
                self._phases.observe((name, row.start, tier), (OTHER, row.start, tier), seconds)

    def families(self, functions: Collection[FunctionName] | None) -> list[MetricFamily]:
        """The metric families. `functions` are those that are deployed; None while that is not known."""
        if functions is not None:
            self._forget_all_but({*functions, OTHER})
        ended = MetricFamily("fleetstart_invocations_total", "counter", "Invocations that ended at this gateway.")
        for (name, version, status, start), count in self._ended.items():
            ended.add(count, function=name, version=version, status=status, start=start)
        errors = MetricFamily(
            "fleetstart_invocation_errors_total", "counter", "Invocations that failed, by error code."
        )
        for (name, code), count in self._errors.items():
            errors.add(count, function=name, code=code)
        retries = MetricFamily("fleetstart_invocation_retries_total", "counter", "Attempts beyond the first.")
        for name, count in self._attempts.items():
            retries.add(count, function=name)
        billed = MetricFamily("fleetstart_billed_milliseconds_total", "counter", "Execution time that is billed.")
        cost = MetricFamily("fleetstart_cost_dollars_total", "counter", "Cost of billed execution time.")
        for name, (billed_ms, cost_nusd) in self._money.items():
            billed.add(billed_ms, function=name)
            cost.add(cost_nusd / 1e9, function=name)
        lasted = MetricFamily(
            "fleetstart_invocation_seconds", "histogram", "From acceptance until the answer was complete."
        )
        self._lasted.into(lasted, "function", "start")
        first = MetricFamily(
            "fleetstart_first_byte_seconds", "histogram", "From acceptance until the answer began (TTFT)."
        )
        self._first_byte.into(first, "function", "start")
        phases = MetricFamily(
            "fleetstart_cold_start_seconds", "histogram",
            "Phases of calls that waited for a start, by kind of start and by where most of its weights came from.",
        )  # fmt: skip
        self._phases.into(phases, "phase", "start", "tier")
        refused = MetricFamily(
            "fleetstart_refusals_total", "counter", "Calls that were rejected without a worker, by error code."
        )
        for code, count in self._refused.items():
            refused.add(count, code=code)
        return [ended, errors, retries, billed, cost, lasted, first, phases, refused]

    def _forget_all_but(self, functions: set[str]) -> None:
        _keep(self._ended, lambda key: key[0] in functions)
        _keep(self._errors, lambda key: key[0] in functions)
        _keep(self._lasted.seen, lambda key: key[0] in functions)
        _keep(self._first_byte.seen, lambda key: key[0] in functions)
        _keep(self._attempts, functions.__contains__)
        _keep(self._money, functions.__contains__)


class _Histograms(Generic[Key]):
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.seen: dict[Key, Histogram] = {}

    def observe(self, key: Key, other: Key, value: float) -> None:
        key = _within(self.seen, key, other)
        known = self.seen.get(key)
        if known is None:
            known = self.seen[key] = Histogram(self._bounds)
        known.observe(value)

    def into(self, family: MetricFamily, *names: str) -> None:
        for key, seen in self.seen.items():
            family.add_histogram(seen, **dict(zip(names, key, strict=True)))  # type: ignore[call-overload]


def _keep(known: dict[Key, Any], wanted: Callable[[Key], bool]) -> None:
    for key in [key for key in known if not wanted(key)]:
        del known[key]


def _within(known: Collection[Key], key: Key, other: Key) -> Key:
    """The key, or `other` if there are too many keys already."""
    return key if key in known or len(known) < SERIES_MAX else other


def tier_of(fetched: dict[str, int]) -> str:
    """The source of most of a start's weights; "host" if all of them were in memory, or it has none."""
    return max(fetched, key=lambda source: fetched[source]) if any(fetched.values()) else "host"
