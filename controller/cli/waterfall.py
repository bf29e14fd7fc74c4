"""Waterfall chart of a timeline as text: one bar a phase on a common axis, so that overlap is visible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fleetstart.runtime.contract.billing.ledger import CalledFunction, InvocationRow, InvocationTrace, dollars
from fleetstart.runtime.contract.node.orders import SecondEngine
from fleetstart.runtime.contract.timeline import Phase

from . import output

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
    "call": "other functions",
    "respond": "sending the answer",
    "move": "to another worker, in mid-stream",
}


def waterfall(phases: Sequence[Phase], *, width: int = 100) -> str:
    """Draws a timeline: one line `phase  bars  ms` a name, ordered by start; the shortest phase still has a mark."""
    if not phases:
        return "no phases were recorded"
    rows: dict[str, list[Phase]] = {}
    for phase in sorted(phases, key=lambda phase: (phase.started_ns, -phase.ended_ns)):
        rows.setdefault(phase.name, []).append(phase)
    begin_ns = min(phase.started_ns for phase in phases)
    span_ns = max(1, max(phase.ended_ns for phase in phases) - begin_ns)
    numbers = [f"{sum(phase.duration_ms for phase in row):.1f}" for row in rows.values()]
    name_width = max(map(len, rows))
    number_width = max(map(len, numbers))
    meaning_width = max(len(MEANING.get(name, "")) for name in rows)
    columns = max(10, width - name_width - number_width - meaning_width - 9)
    lines = []
    for (name, row), number in zip(rows.items(), numbers, strict=True):
        shares = [((p.started_ns - begin_ns) / span_ns, (p.ended_ns - begin_ns) / span_ns) for p in row]
        drawn = _over(bar(begin, end, columns) for begin, end in shares)
        lines.append(f"{name:<{name_width}}  {drawn}  {number:>{number_width}} ms  {MEANING.get(name, '')}".rstrip())
    lines.append(" " * (name_width + 2) + _axis(span_ns / 1e6, columns))
    return "\n".join(lines)


def compare_timelines(before: Sequence[Phase], now: Sequence[Phase], *, width: int = 100) -> str:
    """Draws two timelines on one axis, both starting at zero: each phase now and, below it, before."""
    if not (before and now):
        return waterfall(now or before, width=width)
    rows: dict[str, tuple[list[Phase], list[Phase]]] = {}
    for number, phases in enumerate((now, before)):
        begin_ns = min(phase.started_ns for phase in phases)
        for phase in sorted(phases, key=lambda phase: phase.started_ns):
            shifted = Phase(phase.name, phase.started_ns - begin_ns, phase.ended_ns - begin_ns)
            rows.setdefault(phase.name, ([], []))[number].append(shifted)
    span_ns = max(1, *(phase.ended_ns for pair in rows.values() for row in pair for phase in row))
    name_width = max(map(len, rows))
    columns = max(10, width - name_width - len("  before  ") - len("  1234567.8 ms  +1234567.8"))
    lines = []
    for name, pair in rows.items():
        now_ms, before_ms = (sum(phase.duration_ms for phase in row) for row in pair)
        for row, title, said, total_ms, change in (
            (pair[0], name, "now", now_ms, f"  {now_ms - before_ms:+.1f}"),
            (pair[1], "", "before", before_ms, ""),
        ):
            drawn = _over(bar(p.started_ns / span_ns, p.ended_ns / span_ns, columns) for p in row) if row else ""
            lines.append(f"{title:<{name_width}}  {said:<6}  {drawn:<{columns}}  {total_ms:>9.1f} ms{change}")
    lines.append(" " * (name_width + 10) + _axis(span_ns / 1e6, columns))
    return "\n".join(lines)


def _over(bars: Iterable[str]) -> str:
    """Bars of one width laid over each other; where two meet, the fuller column stays."""
    return "".join(max(column, key=EIGHTHS.index) for column in zip(*bars, strict=True))


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


def render_trace(trace: InvocationTrace, *, width: int) -> str:
    row = trace.row
    bill = f"billed {row.billed_ms} ms of {output.format_size(row.memory_bytes)} = ${dollars(row.cost_nusd)}"
    waived = f"waited {row.queue_ms} ms, not billed"
    chart = waterfall(trace.timeline.phases, width=width)
    spans = f"\ntrace {trace.context.trace_id}" if trace.context.trace_id else ""
    called = "".join(f"\n{_called_line(one)}" for one in trace.called)
    return f"{trace_summary(trace)}\n\n{chart}\n\n{bill}; {waived}{_made_by(row)}{called}{spans}"


def _called_line(one: CalledFunction) -> str:
    outcome = f"HTTP {one.status}" + (f" {one.error}" if one.error else "")
    return f"called {one.function}, {outcome}, {one.took_ms:.1f} ms, billed by itself: {one.id}"


def _made_by(row: InvocationRow) -> str:
    return f"\ncalled by {row.caller}: {row.parent}" if row.parent else ""


def trace_summary(trace: InvocationTrace) -> str:
    """The call and its outcome on one line."""
    row = trace.row
    outcome = f"HTTP {row.status}" + (f" {row.error}" if row.error else "")
    worker = f"worker {row.worker or 'none'}{', pooled' if trace.pooled else ''}"
    start = [f"{row.start} start"] if row.worker else []
    facts = [f"{row.function}@{row.version}", *start, outcome, worker]
    if trace.relayed:
        facts.append(f"{stage_list(trace.relayed)} reached through the object store")
    if trace.second_engine is not None:
        facts.append(second_engine_line(trace.second_engine))
    if trace.fetched:
        facts.append(
            ", ".join(f"{output.format_size(count)} from the {source}" for source, count in trace.fetched.items())
        )
    if row.attempts > 1:
        facts.append(f"{row.attempts} attempts")
    return f"{row.id}   {', '.join(facts)}"


def second_engine_line(second: SecondEngine) -> str:
    """The state of an engine behind the first one, when a call ended."""
    came = f"{second.engine} began {second.waited_ms} ms after the first engine"
    match second.state:
        case "waiting":
            return f"{second.engine} waits behind the first engine"
        case "starting":
            return f"{came} and was not up yet"
        case "failed":
            return f"{came} and did not come up: {second.error}"
        case _:
            moved = f"{second.moved} stream{'' if second.moved == 1 else 's'} moved to it"
            return f"{came} and came up in {second.took_ms} ms, {moved}"


def stage_list(indices: Sequence[int]) -> str:
    return f"stage{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
