"""`fs usage`: the bill, as the sum of the ledger's rows."""

from __future__ import annotations

import re
import time
from datetime import datetime
from pathlib import Path

import click

from fleetstart.controller.cli import output
from fleetstart.controller.cli.client import Server, find_server, suggesting
from fleetstart.controller.cli.root import verb
from fleetstart.controller.resources import FunctionInfo, Usage, UsageLine
from fleetstart.runtime.contract.ledger import dollars

_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@click.command
@click.argument("name", required=False)
@click.option("--since", default="24h", show_default=True, metavar="AGE|DATE", help="90s, 15m, 24h, 7d or 2026-01-31.")
@verb()
@click.pass_obj
def command(home: Path, *, name: str | None, since: str, url: str | None, as_json: bool) -> None:
    """Show the bill: by function, version and kind. Calls are billed; starting and fetching is waived."""
    since_unix_ms = _since(since, now_s=time.time())
    with Server(find_server(url, home)) as server:
        query: dict[str, str | int] = {"since_unix_ms": since_unix_ms, **({"function": name} if name else {})}
        usage = server.get("/api/v1/usage", Usage, **query)
        if name and not usage.lines:
            # No rows: either it was not called, or there is no such function.
            with suggesting(server, name):
                server.get(f"/api/v1/functions/{name}", FunctionInfo)
    if as_json:
        output.json_data(usage)
    else:
        output.data(shown(usage))


def shown(usage: Usage) -> str:
    rows = [
        (
            line.function,
            str(line.version),
            line.kind,
            str(line.rows),
            f"{line.duration_ms / 1000:.3f}",
            _cost(line),
        )
        for line in usage.lines
    ]
    headings = ("FUNCTION", "VERSION", "KIND", "ROWS", "SECONDS", "COST")
    total = ("total", "", "", "", "", f"${dollars(usage.total_nusd)}")
    return output.table(headings, [*rows, total], right=frozenset({1, 3, 4, 5}))


def _cost(line: UsageLine) -> str:
    """Busy time is billed through the calls that share it; what costs nothing is said to be waived."""
    if line.kind == "invocation" or line.cost_nusd:
        return f"${dollars(line.cost_nusd)}"
    return "by call" if line.kind == "execute" else "waived"


def _since(text: str, *, now_s: float) -> int:
    if match := _LENGTH.fullmatch(text.strip()):
        return round((now_s - float(match[1]) * _SECONDS[match[2]]) * 1000)
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is neither an age such as 24h nor a date", param_hint="--since") from error
