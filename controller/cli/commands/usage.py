"""`fs usage`: sums of the ledger's rows, grouped by function, version, phase, key, project, caller, tag or day."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import click

from fleetstart.runtime.contract.billing.ledger import dollars

from ...schemas.functions import Usage, UsageLine
from .. import output
from ..api_client import ApiClient, find_server, require_function
from ..completions import function_names
from ..root import verb
from ..units import parse_unix_ms

_HEADINGS = {
    "function": "FUNCTION",
    "version": "VERSION",
    "phase": "PHASE",
    "key": "KEY",
    "project": "PROJECT",
    "caller": "CALLER",
    "parent": "PARENT",
    "day": "DAY",
}


@click.command
@click.argument("name", required=False, shell_complete=function_names)
@click.option(
    "--by",
    default="function,version,phase",
    show_default=True,
    metavar="LIST",
    help="Any of function, version, phase, key, project, caller, parent, tag, tag:NAME, day.",
)
@click.option("--since", default="24h", show_default=True, metavar="AGE|DATE", help="90s, 15m, 24h, 7d or 2026-01-31.")
@click.option("--until", metavar="AGE|DATE", help="Until just before; without it, now.")
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated values; money in nano-dollars and in dollars.")
@verb()
@click.pass_obj
def command(
    home: Path,
    *,
    name: str | None,
    by: str,
    since: str,
    until: str | None,
    as_csv: bool,
    url: str | None,
    as_json: bool,
) -> None:
    """Show the bill, by function, version, phase, key, project, tag or day (UTC).

    Calls are billed, and the idle time of workers that are kept because of `min`. Everything else is shown and waived:
    starting, fetching, loading, other idle time, starts that failed. A row counts to the moment at which it was booked.
    What workers used (processor time, most memory, bytes of hosts in `network`) stands beside it and is not charged.
    `--by caller` tells calls that functions made from those of clients, `--by parent` names the calls that needed them.
    """
    now_s = time.time()
    query: dict[str, str | int] = {
        "by": by,
        "since_unix_ms": max(0, parse_unix_ms(since, now_s=now_s, option="--since")),
    }
    if until is not None:
        query["until_unix_ms"] = max(0, parse_unix_ms(until, now_s=now_s, option="--until"))
    if name:
        query["function"] = name
    with ApiClient(find_server(url, home), timeout_s=120.0) as server:
        usage = server.get("/api/v1/usage", Usage, **query)
        if name and not usage.lines:
            require_function(server, name)  # no rows: either it was not called, or there is no such function
    if as_json:
        output.json_data(usage)
    elif as_csv:
        output.data(output.csv(_csv_headings(usage), [_csv_row(usage, line) for line in usage.lines]))
    else:
        output.data(shown(usage))


_MEASURED: dict[str, Callable[[UsageLine], str]] = {
    "DEVICE GiB-s": lambda line: f"{line.device_gib_ms / 1000:.3f}" if line.device_gib_ms else "",
    "CPU s": lambda line: "" if line.cpu_ms is None else f"{line.cpu_ms / 1000:.3f}",
    "MEMORY PEAK": lambda line: _size(line.memory_peak_bytes),
    "IN": lambda line: _size(line.received_bytes),
    "OUT": lambda line: _size(line.sent_bytes),
    "DEVICE PEAK": lambda line: _size(line.device_peak_bytes),
}
"""Columns that are shown if a line has something in them."""
_MEASURED_CSV = ("cpu_ms", "memory_peak_bytes", "received_bytes", "sent_bytes", "device_peak_bytes")


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else output.format_size(size_bytes)


def shown(usage: Usage) -> str:
    measured = {name: cell for name, cell in _MEASURED.items() if any(map(cell, usage.lines))}
    rows = [
        (
            *_group(usage, line),
            str(line.rows),
            f"{line.duration_ms / 1000:.3f}",
            f"{line.waived_ms / 1000:.3f}" if line.waived_ms else "",
            *(cell(line) for cell in measured.values()),
            _cost(usage, line),
        )
        for line in usage.lines
    ]
    groups = [_HEADINGS.get(name, name.upper()) for name in usage.by]
    headings = (*groups, "ROWS", "SECONDS", "WAIVED", *measured, "COST")
    waived_ms = sum(line.waived_ms for line in usage.lines)
    count = str(sum(line.rows for line in usage.lines))
    total = (
        "total",
        *("" for _ in groups[1:]),
        count,
        "",
        f"{waived_ms / 1000:.3f}" if waived_ms else "",
        *("" for _ in measured),
        f"${dollars(usage.total_nusd)}",
    )
    numbers = {at for at, name in enumerate(usage.by) if name == "version"} | set(range(len(groups), len(headings)))
    return output.table(headings, [*rows, total], right=frozenset(numbers))


def _group(usage: Usage, line: UsageLine) -> list[str]:
    values = {
        "function": line.function,
        "version": str(line.version),
        "phase": line.kind,
        "key": line.key,
        "project": line.project,
        "caller": line.caller,
        "parent": line.parent,
        "day": line.day,
    }
    return [values.get(name, line.tag) for name in usage.by]


def _cost(usage: Usage, line: UsageLine) -> str:
    """Busy time is billed through the calls that share it; what costs nothing is said to be waived."""
    if line.cost_nusd or not line.waived_ms:
        return "see invocation" if line.kind == "execute" else f"${dollars(line.cost_nusd)}"
    return "waived"


def _csv_headings(usage: Usage) -> list[str]:
    return [*usage.by, "rows", "duration_ms", "waived_ms", "cost_nusd", "cost_usd", "device_gib_ms", *_MEASURED_CSV]


def _csv_row(usage: Usage, line: UsageLine) -> list[str]:
    numbers = [str(number) for number in (line.rows, line.duration_ms, line.waived_ms, line.cost_nusd)]
    measured = ["" if (value := getattr(line, name)) is None else str(value) for name in _MEASURED_CSV]
    return [*_group(usage, line), *numbers, dollars(line.cost_nusd), str(line.device_gib_ms), *measured]
