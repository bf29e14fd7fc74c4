"""Ranges, steps and points of a history: which cells of the store make up which point. Pure.

A *cell* holds the counts of one minute or one hour. Minutes are kept for a day, as traces are; hours for a month.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

from fleetstart.runtime.contract.errors import InvalidInput

from ..schemas.history import CallHistory, RangeName
from .call_counts import CallCounts, merged

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
POINTS_MAX = 1_440
"""Points of an answer at most: a day by the minute."""
_STEP = re.compile(r"(\d{1,4})([mhd])")
_UNIT_MS = {"m": MINUTE_MS, "h": HOUR_MS, "d": DAY_MS}

Resolution = Literal["minutes", "hours"]


class CellSize(NamedTuple):
    """Storage of the cells of one resolution: their length, that of the hash which holds them, and its expiry."""

    cell_ms: int
    hash_ms: int
    kept_s: int
    """Time from the last write to a hash to its expiry: the range beyond the hash's own length."""


CELLS: dict[Resolution, CellSize] = {
    "minutes": CellSize(MINUTE_MS, HOUR_MS, 26 * 3600),
    "hours": CellSize(HOUR_MS, DAY_MS, 32 * 24 * 3600),
}


class HistorySpan(NamedTuple):
    """A range of time in steps, aligned to multiples of the step since 1970 (UTC); the last step contains now."""

    name: RangeName
    resolution: Resolution
    step_ms: int
    since_unix_ms: int
    steps: int

    @property
    def until_unix_ms(self) -> int:
        return self.since_unix_ms + self.steps * self.step_ms

    @property
    def hashes(self) -> range:
        """Numbers of the hashes that hold its cells."""
        size = CELLS[self.resolution]
        return range(self.since_unix_ms // size.hash_ms, (self.until_unix_ms - 1) // size.hash_ms + 1)


MOMENT_MAX_MS = DAY_MS
"""Longest span of `moment_of`, whose cells are read for each function."""

RANGES: dict[RangeName, tuple[int, int]] = {
    "1h": (HOUR_MS, MINUTE_MS),
    "6h": (6 * HOUR_MS, 5 * MINUTE_MS),
    "24h": (DAY_MS, 20 * MINUTE_MS),
    "7d": (7 * DAY_MS, 2 * HOUR_MS),
    "30d": (30 * DAY_MS, 12 * HOUR_MS),
}
"""Length and usual step of each range: 60 to 84 points, a bar of some pixels each on a phone."""


def span_of(range_name: str, step: str, now_unix_ms: int) -> HistorySpan:
    """The span of a range until now; `step` empty: the range's usual one. Errors: InvalidInput."""
    if range_name not in RANGES:
        raise InvalidInput(f"range={range_name[:40]!r} is not known", hint=f"one of {', '.join(get_args(RangeName))}")
    name = range_name
    length_ms, usual_ms = RANGES[name]
    resolution: Resolution = "minutes" if length_ms <= DAY_MS else "hours"
    step_ms = _step_ms(step, name, resolution) if step else usual_ms
    steps = -(-length_ms // step_ms)
    if steps > POINTS_MAX:
        raise InvalidInput(f"step={step} makes {steps} points of {name}", hint=f"at most {POINTS_MAX} points are given")
    last = now_unix_ms // step_ms
    return HistorySpan(name, resolution, step_ms, (last - steps + 1) * step_ms, steps)


def moment_of(since_unix_ms: int, until_unix_ms: int, now_unix_ms: int) -> HistorySpan:
    """The span of one bar, as one step: of minutes while these are kept, else of hours. Errors: InvalidInput."""
    length_ms = until_unix_ms - since_unix_ms
    if not 0 < length_ms <= MOMENT_MAX_MS:
        raise InvalidInput(
            f"from {since_unix_ms} to {until_unix_ms} is {length_ms / HOUR_MS:.1f} h",
            hint="until_unix_ms comes after since_unix_ms, by 24 h at most",
        )
    minutes = now_unix_ms - since_unix_ms <= DAY_MS + HOUR_MS
    return HistorySpan("24h", "minutes" if minutes else "hours", length_ms, since_unix_ms, 1)


def _step_ms(step: str, name: RangeName, resolution: Resolution) -> int:
    match = _STEP.fullmatch(step)
    step_ms = int(match[1]) * _UNIT_MS[match[2]] if match else 0
    cell_ms, (length_ms, _) = CELLS[resolution].cell_ms, RANGES[name]
    if not 0 < step_ms <= length_ms or step_ms % cell_ms:
        raise InvalidInput(
            f"step={step[:40]!r} does not fit range={name}",
            hint=f"whole {resolution} up to {name}, such as {'5m' if resolution == 'minutes' else '6h'}",
        )
    return step_ms


def history_of(function: str, span: HistorySpan, cells: Iterable[tuple[int, CallCounts]]) -> CallHistory:
    """The history made of cells, each with the time at which it begins; those outside the span are left out."""
    steps = [CallCounts() for _ in range(span.steps)]
    for begin_unix_ms, counts in cells:
        at = (begin_unix_ms - span.since_unix_ms) // span.step_ms
        if 0 <= at < span.steps:
            steps[at].merge(counts)
    return CallHistory(
        function=function,
        range=span.name,
        step_s=span.step_ms // 1000,
        since_unix_ms=span.since_unix_ms,
        until_unix_ms=span.until_unix_ms,
        points=[counts.point(span.since_unix_ms + at * span.step_ms) for at, counts in enumerate(steps)],
        total=merged(steps).point(span.since_unix_ms),
    )
