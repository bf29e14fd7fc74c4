"""`fs history`: calls, errors, latencies, starts and cost over hours or days as sparklines, and events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import click

from fleetstart.runtime.contract.billing.ledger import dollars

from ...schemas.history import CallHistory, HistoryPoint, RangeName, SystemEvent
from .. import output
from ..api_client import ApiClient, find_server, suggest_function
from ..completions import function_names
from ..root import verb

BLOCKS = "▁▂▃▄▅▆▇█"
EVENTS = 20


@click.command
@click.argument("function", required=False, shell_complete=function_names)
@click.option("--range", "range_", type=click.Choice(get_args(RangeName)), default="24h", show_default=True)
@click.option("--step", metavar="LENGTH", help="Length of a column: 5m, 1h, 1d; without it, 60 to 84 columns.")
@verb()
@click.pass_obj
def command(home: Path, *, function: str | None, range_: str, step: str | None, url: str | None, as_json: bool) -> None:
    """Show what the calls of a function, or of all, were like over hours or days.

    Below the sparklines are the deploys, changes, failed starts and budget alerts of that time. Times are UTC. Minutes
    are kept for a day, hours for a month.
    """
    query: dict[str, str | int] = {"range": range_}
    if step:
        query["step"] = step
    if function:
        query["function"] = function
    with ApiClient(find_server(url, home)) as server:
        with suggest_function(server, function) if function else nullcontext():
            found = server.get("/api/v1/history", CallHistory, **query)
        if as_json:
            output.json_data(found)
            return
        span: dict[str, str | int] = {"since_unix_ms": found.since_unix_ms, "limit": EVENTS}
        named: dict[str, str | int] = {"function": function} if function else {}
        events = server.get("/api/v1/events", list[SystemEvent], **span, **named)
    output.data(shown(found))
    if events:
        output.data("\n" + events_table(events))


def shown(history: CallHistory) -> str:
    """The table of sparklines, one row a quantity."""
    total = history.total
    lines: list[tuple[str, Callable[[HistoryPoint], float | None], str]] = [
        ("calls", lambda point: point.calls, f"{total.calls:,}"),
        ("failed", lambda point: point.failed, _share(total.failed, total.calls)),
        ("refused", lambda point: point.refused, _share(total.refused, total.calls)),
        ("p50", lambda point: point.p50_ms, _ms(total.p50_ms)),
        ("p95", lambda point: point.p95_ms, _ms(total.p95_ms)),
        ("cold starts", lambda point: point.cold, _share(total.cold, total.calls)),
        ("warm starts", lambda point: point.warm, _share(total.warm, total.calls)),
        ("wait for start", lambda point: point.wait_p50_ms, _ms(total.wait_p50_ms)),
        ("cost", lambda point: point.cost_nusd, f"${dollars(total.cost_nusd)}"),
    ]
    rows = [(name, sparkline([value(point) for point in history.points]), text) for name, value, text in lines]
    begin, end = (_minute(at) for at in (history.since_unix_ms, history.until_unix_ms))
    headings = (
        history.function or "all functions",
        f"{begin} to {end}, a column is {_length(history.step_s)}",
        "TOTAL",
    )
    return output.table(headings, rows, right=frozenset({2}))


def sparkline(values: Sequence[float | None]) -> str:
    """A column for each value, as high as its share of the highest; a blank for none and for 0."""
    most = max((value for value in values if value), default=0)
    return "".join(BLOCKS[max(0, round(value / most * len(BLOCKS)) - 1)] if value else " " for value in values)


def events_table(events: Sequence[SystemEvent]) -> str:
    rows = [
        (_minute(event.unix_ms), event.kind, _name(event), " ".join(event.text.split())[:200])
        for event in reversed(events)
    ]
    return output.table(("WHEN", "EVENT", "FUNCTION", "WHAT"), rows)


def _name(event: SystemEvent) -> str:
    return f"{event.function}@{event.version}" if event.version else event.function


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({100 * part / whole:.1f}%)" if part else "0"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f} ms"


def _minute(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")


def _length(seconds: int) -> str:
    unit_s, unit = next((size, name) for size, name in ((86_400, "d"), (3600, "h"), (60, "min")) if seconds % size == 0)
    return f"{seconds // unit_s} {unit}"
