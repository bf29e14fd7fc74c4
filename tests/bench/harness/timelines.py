"""Timeline of a call from its trace: the phases, and the gaps in which none of them runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.bench.harness.samples import fine, median

PHASES = ("place", "start", "fetch", "device", "import", "load", "execute", "respond")
BETWEEN = "between"
"""An order or a "ready" on its way from process to process, and the event loops that it waits for."""


def phases_ms(trace: Any, *, sent_ns: int, ended_ns: int) -> dict[str, float]:
    """Length of each phase inside the caller's own two stamps, and of the time in which no phase ran.

    All stamps are of one machine's monotonic clock. Phases may overlap, so the sum may exceed the whole.
    """
    spans: list[tuple[int, int]] = []
    found: dict[str, float] = {}
    for phase in trace["timeline"]["phases"]:
        started = max(phase["started_ns"], sent_ns)
        ended = min(phase["ended_ns"], ended_ns)
        if phase["name"] == "queue" or ended <= started:
            continue
        spans.append((started, ended))
        found[phase["name"]] = found.get(phase["name"], 0.0) + (ended - started) / 1e6
    found[BETWEEN] = (ended_ns - sent_ns - _union_ns(spans)) / 1e6
    return found


def phase_rows(columns: Mapping[str, Sequence[dict[str, float]]]) -> list[list[str]]:
    """Rows of a table: the median of each phase in each column's samples."""
    names = [name for name in (*PHASES, BETWEEN) if any(name in one for samples in columns.values() for one in samples)]
    return [
        [f"of it {name}", *(_cell([one.get(name, 0.0) for one in samples]) for samples in columns.values())]
        for name in names
    ]


def _cell(values: Sequence[float]) -> str:
    return fine(median(values)) if values and any(values) else "–"


def _union_ns(spans: list[tuple[int, int]]) -> int:
    total, reached = 0, 0
    for started, ended in sorted(spans):
        total += max(0, ended - max(started, reached))
        reached = max(reached, ended)
    return total
