"""Usage and invoices: sums of the ledger's rows for `fs usage` and `fs invoice`. Pure, integers throughout.

Any grouping is a partition of the same rows, so its lines add up to the same total, to the last nano-dollar.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches

from fleetstart.runtime.contract.billing.ledger import InvocationRow, LedgerRow, PhaseRow
from fleetstart.runtime.contract.errors import InvalidInput
from fleetstart.runtime.contract.ids import FunctionName, Version
from fleetstart.runtime.contract.sizes import GIB

from ..schemas.functions import Invoice, InvoiceLine, Usage, UsageLine
from ..state.access_records import DEFAULT
from .archive_format import LedgerEntry

DIMENSIONS = ("function", "version", "phase", "key", "project", "caller", "parent", "tag", "day")
DEFAULT_BY = ("function", "version", "phase")
_MONTH = re.compile(r"(\d{4})-(0[1-9]|1[0-2])")

MEASURED: dict[str, Callable[[tuple[int, int]], int]] = {
    "cpu_ms": sum,
    "memory_peak_bytes": max,
    "received_bytes": sum,
    "sent_bytes": sum,
    "device_peak_bytes": max,
}
"""Columns of workers' rows that are for information, and how those of several rows are joined."""

By = tuple[str, ...]
Group = tuple[str | int, ...]


def parse_by(text: str) -> By:
    """ "function,day,tag:team" → its dimensions. Errors: InvalidInput."""
    by = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in by:
        if name not in DIMENSIONS and not (name.startswith("tag:") and len(name) > 4):
            near = get_close_matches(name, DIMENSIONS, n=1)
            raise InvalidInput(
                f"usage cannot be shown by {name[:40]!r}",
                hint=f"did you mean {near[0]}?" if near else f"{', '.join(DIMENSIONS)} and tag:NAME are known",
            )
    if sum(name.startswith("tag") for name in by) > 1:
        raise InvalidInput("usage is shown by one tag at a time, or by all of them together")
    return by or DEFAULT_BY


def phase_of(row: LedgerRow) -> str:
    return "invocation" if isinstance(row, InvocationRow) else row.phase


def duration_ms(row: LedgerRow) -> int:
    """The time that the rate applies to: an invocation's share of its worker's time, a phase's length."""
    return row.billed_ms if isinstance(row, InvocationRow) else row.duration_ms


def is_waived(row: LedgerRow) -> bool:
    """True if the row is unbilled time of a worker. `execute` time is billed by the invocations that share it."""
    return row.rate_nusd_per_gib_s == 0 and row.device_rate_nusd_per_gib_s == 0 and phase_of(row) != "execute"


def day_of(entry: LedgerEntry) -> str:
    """The day (UTC) on which an entry was booked."""
    return datetime.fromtimestamp(entry.id.unix_ms // 1000, UTC).strftime("%Y-%m-%d")


def month_span(text: str) -> tuple[int, int]:
    """ "2026-11" → its first millisecond and that of the next month, UTC. Errors: InvalidInput."""
    match = _MONTH.fullmatch(text)
    if match is None:
        raise InvalidInput(f"{text[:40]!r} is no month", hint="write it as 2026-11")
    year, month = int(match[1]), int(match[2])
    if not 1970 <= year <= 9998:
        raise InvalidInput(f"there are no invoices of the year {year}")
    following = (year + 1, 1) if month == 12 else (year, month + 1)
    return _first_ms(year, month), _first_ms(*following)


def _first_ms(year: int, month: int) -> int:
    return int(datetime(year, month, 1, tzinfo=UTC).timestamp()) * 1000


@dataclass(slots=True)
class _Sum:
    rows: int = 0
    duration_ms: int = 0
    waived_ms: int = 0
    cost_nusd: int = 0
    device_byte_ms: int = 0
    measured: dict[str, int] = field(default_factory=dict)
    """What workers used, of MEASURED; without what no row has."""

    @property
    def device_gib_ms(self) -> int:
        return (self.device_byte_ms + GIB // 2) // GIB

    def measure(self, row: LedgerRow) -> None:
        for name, joined in MEASURED.items() if isinstance(row, PhaseRow) else ():
            value: int | None = getattr(row, name)
            if value is not None:
                self.measured[name] = joined((self.measured.get(name, 0), value))


@dataclass(slots=True)
class UsageSums:
    """Adds rows up by some dimensions; `function` None takes those of all functions."""

    by: By = DEFAULT_BY
    function: FunctionName | None = None
    _sums: dict[Group, _Sum] = field(default_factory=dict)

    def add(self, entries: Iterable[LedgerEntry]) -> None:
        for entry in entries:
            row = entry.row
            if self.function is not None and row.function != self.function:
                continue
            group = tuple(_value(entry, name) for name in self.by)
            total = self._sums.get(group)
            if total is None:
                total = self._sums[group] = _Sum()
            length_ms = duration_ms(row)
            total.rows += 1
            total.duration_ms += length_ms
            total.waived_ms += length_ms if is_waived(row) else 0
            total.cost_nusd += row.cost_nusd
            total.device_byte_ms += length_ms * row.device_bytes
            total.measure(row)

    def result(self, since_unix_ms: int, until_unix_ms: int) -> Usage:
        lines = [self._line(group, total) for group, total in sorted(self._sums.items())]
        return Usage(
            since_unix_ms=since_unix_ms,
            until_unix_ms=until_unix_ms,
            by=list(self.by),
            lines=lines,
            total_nusd=sum(line.cost_nusd for line in lines),
        )

    def _line(self, group: Group, total: _Sum) -> UsageLine:
        shown = dict(zip(self.by, group, strict=True))
        tag = next((value for name, value in shown.items() if name.startswith("tag")), "")
        return UsageLine(
            function=FunctionName(str(shown.get("function", ""))),
            version=Version(int(shown.get("version", 0))),
            kind=str(shown.get("phase", "")),
            key=str(shown.get("key", "")),
            project=str(shown.get("project", "")),
            caller=str(shown.get("caller", "")),
            parent=str(shown.get("parent", "")),
            tag=str(tag),
            day=str(shown.get("day", "")),
            rows=total.rows,
            duration_ms=total.duration_ms,
            waived_ms=total.waived_ms,
            device_gib_ms=total.device_gib_ms,
            cost_nusd=total.cost_nusd,
            **total.measured,
        )


def _value(entry: LedgerEntry, dimension: str) -> str | int:
    row = entry.row
    match dimension:
        case "function":
            return row.function
        case "version":
            return row.version
        case "phase":
            return phase_of(row)
        case "key":
            return row.key if isinstance(row, InvocationRow) else ""
        case "project":
            return row.project or DEFAULT
        case "caller":
            return row.caller if isinstance(row, InvocationRow) else ""
        case "parent":
            return row.parent if isinstance(row, InvocationRow) else ""
        case "day":
            return day_of(entry)
        case "tag":
            return ",".join(f"{name}={value}" for name, value in sorted(row.tags.items()))
        case _:
            return row.tags.get(dimension.removeprefix("tag:"), "")


@dataclass(slots=True)
class InvoiceSums:
    """Adds all rows of a month up, by what determines their price."""

    function: FunctionName | None = None
    _sums: dict[tuple[FunctionName, Version, str, int, int, str, int], _Sum] = field(default_factory=dict)

    def add(self, entries: Iterable[LedgerEntry]) -> None:
        for entry in entries:
            row = entry.row
            if self.function is not None and row.function != self.function:
                continue
            rates = (row.rate_nusd_per_gib_s, row.device_type, row.device_rate_nusd_per_gib_s)
            group = (row.function, row.version, phase_of(row), row.price, *rates)
            total = self._sums.get(group)
            if total is None:
                total = self._sums[group] = _Sum()
            total.rows += 1
            total.duration_ms += duration_ms(row)
            total.cost_nusd += row.cost_nusd
            total.device_byte_ms += duration_ms(row) * row.device_bytes

    def result(self, month: str, *, complete: bool, segments: int, checksum: str) -> Invoice:
        lines = [
            InvoiceLine(
                function=function,
                version=version,
                kind=kind,
                price=price,
                rate_nusd_per_gib_s=rate,
                device_type=device_type,
                device_rate_nusd_per_gib_s=device_rate,
                device_gib_ms=total.device_gib_ms,
                rows=total.rows,
                duration_ms=total.duration_ms,
                cost_nusd=total.cost_nusd,
            )
            for (function, version, kind, price, rate, device_type, device_rate), total in sorted(self._sums.items())
        ]
        return Invoice(
            month=month,
            complete=complete,
            lines=lines,
            rows=sum(line.rows for line in lines),
            total_nusd=sum(line.cost_nusd for line in lines),
            segments=segments,
            checksum=checksum,
        )
