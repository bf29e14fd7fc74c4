"""Usage and invoices: sums of the ledger's rows for `fs usage` and `fs invoice`. Pure, integers throughout.

Any grouping is a partition of the same rows, so its lines add up to the same total, to the last nano-dollar.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from operator import attrgetter

from fleetstart.runtime.contract.errors import InvalidInput
from fleetstart.runtime.contract.ids import FunctionName, Version
from fleetstart.runtime.contract.sizes import GIB

from ..schemas.functions import Invoice, InvoiceLine, Usage, UsageLine
from .group_sums import GroupSum, RowGroup, Sums, add_to, day_name

DIMENSIONS = ("function", "version", "phase", "key", "project", "caller", "parent", "tag", "day")
DEFAULT_BY = ("function", "version", "phase")
_MONTH = re.compile(r"(\d{4})-(0[1-9]|1[0-2])")

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


def is_waived(group: RowGroup) -> bool:
    """True for unbilled time of a worker. `execute` time is billed by the invocations that share it."""
    return group.rate_nusd_per_gib_s == 0 and group.device_rate_nusd_per_gib_s == 0 and group.phase != "execute"


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
class UsageSums:
    """Adds sums up by some dimensions; `function` None takes those of all functions."""

    by: By = DEFAULT_BY
    function: FunctionName | None = None
    _sums: dict[Group, GroupSum] = field(default_factory=dict)
    _waived_ms: dict[Group, int] = field(default_factory=dict)

    @property
    def by_parent(self) -> bool:
        """True if it needs sums by parent."""
        return "parent" in self.by

    def add(self, sums: Sums) -> None:
        group_of = _group_by(self.by)
        for rows, total in sums:
            if self.function is not None and rows.function != self.function:
                continue
            group = group_of(rows)
            add_to(self._sums, group, total)
            if is_waived(rows):
                self._waived_ms[group] = self._waived_ms.get(group, 0) + total.duration_ms

    def result(self, since_unix_ms: int, until_unix_ms: int) -> Usage:
        lines = [self._line(group, total) for group, total in sorted(self._sums.items())]
        return Usage(
            since_unix_ms=since_unix_ms,
            until_unix_ms=until_unix_ms,
            by=list(self.by),
            lines=lines,
            total_nusd=sum(line.cost_nusd for line in lines),
        )

    def _line(self, group: Group, total: GroupSum) -> UsageLine:
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
            day=day_name(int(shown["day"])) if "day" in shown else "",
            rows=total.rows,
            duration_ms=total.duration_ms,
            waived_ms=self._waived_ms.get(group, 0),
            device_gib_ms=_gib_ms(total),
            cost_nusd=total.cost_nusd,
            **total.measured,
        )


def _gib_ms(total: GroupSum) -> int:
    return (total.device_byte_ms + GIB // 2) // GIB


def _group_by(by: By) -> Callable[[RowGroup], Group]:
    """Makes the function that gives each group of rows the values of some dimensions."""
    if len(by) > 1 and set(by) <= set(RowGroup.__struct_fields__):
        return attrgetter(*by)  # half the time of the other one, which counts with many groups
    return lambda group: tuple(_value(group, name) for name in by)


def _value(group: RowGroup, dimension: str) -> str | int:
    if dimension == "tag":
        return ",".join(f"{name}={value}" for name, value in group.tags)
    if dimension.startswith("tag:"):
        return dict(group.tags).get(dimension.removeprefix("tag:"), "")
    value: str | int = getattr(group, dimension)
    return value


@dataclass(slots=True)
class InvoiceSums:
    """Adds all sums of a month up, by what determines the price of a row."""

    function: FunctionName | None = None
    _sums: dict[tuple[FunctionName, Version, str, int, int, str, int], GroupSum] = field(default_factory=dict)

    def add(self, sums: Sums) -> None:
        for rows, total in sums:
            if self.function is not None and rows.function != self.function:
                continue
            rates = (rows.rate_nusd_per_gib_s, rows.device_type, rows.device_rate_nusd_per_gib_s)
            group = (rows.function, rows.version, rows.phase, rows.price, *rates)
            add_to(self._sums, group, total)

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
                device_gib_ms=_gib_ms(total),
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
