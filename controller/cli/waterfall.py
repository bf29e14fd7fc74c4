"""A timeline as a chart of text: one bar a phase on a common axis, so that overlap is seen."""

from __future__ import annotations

from collections.abc import Sequence

from fleetstart.runtime.contract.timeline import Phase

EIGHTHS = " ▏▎▍▌▋▊▉█"
MEANING = {
    "queue": "waiting at the gateway",
    "place": "choosing a node",
    "start": "starting a process",
    "fetch": "weights from the store",
    "device": "device",
    "import": "libraries and handler",
    "load": "weights bound, load()",
    "execute": "the call itself",
    "respond": "sending the answer",
}


def waterfall(phases: Sequence[Phase], *, width: int = 100) -> str:
    """Lines `phase  |bar|  ms`, ordered by start; a phase too short to draw still shows its mark."""
    if not phases:
        return "no phases were recorded"
    ordered = sorted(phases, key=lambda phase: (phase.started_ns, -phase.ended_ns))
    begin_ns = ordered[0].started_ns
    span_ns = max(1, max(phase.ended_ns for phase in ordered) - begin_ns)
    numbers = [f"{phase.duration_ms:.1f}" for phase in ordered]
    name_width = max(len(phase.name) for phase in ordered)
    number_width = max(map(len, numbers))
    meaning_width = max(len(MEANING.get(phase.name, "")) for phase in ordered)
    columns = max(10, width - name_width - number_width - meaning_width - 9)
    lines = []
    for phase, number in zip(ordered, numbers, strict=True):
        drawn = bar((phase.started_ns - begin_ns) / span_ns, (phase.ended_ns - begin_ns) / span_ns, columns)
        meaning = MEANING.get(phase.name, "")
        lines.append(f"{phase.name:<{name_width}}  {drawn}  {number:>{number_width}} ms  {meaning}".rstrip())
    lines.append(" " * (name_width + 2) + _axis(span_ns / 1e6, columns))
    return "\n".join(lines)


def bar(begin: float, end: float, columns: int) -> str:
    """A bar from share `begin` to share `end` of the columns; starts on a whole column, ends on an eighth."""
    first = min(int(begin * columns), columns - 1)
    eighths = max(1, round((end - begin) * columns * 8))
    full, rest = divmod(eighths, 8)
    full = min(full, columns - first)
    drawn = EIGHTHS[8] * full
    if rest and first + full < columns:
        drawn += EIGHTHS[rest]
    return (" " * first + drawn).ljust(columns)


def _axis(span_ms: float, columns: int) -> str:
    end = f"{span_ms:.1f} ms"
    return "0" + "·" * max(1, columns - 1 - len(end)) + end
