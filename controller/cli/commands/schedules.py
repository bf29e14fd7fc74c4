"""`fs schedules`: functions with a schedule, and their next calls."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ...schemas.invocations import ScheduleInfo
from .. import output
from ..api_client import ApiClient, find_server
from ..root import verb
from ..units import format_utc


@click.command
@verb()
@click.pass_obj
def command(home: Path, *, url: str | None, as_json: bool) -> None:
    """List the schedules of live versions: schedule="*/5 * * * *" in the decorator or in fs.toml."""
    with ApiClient(find_server(url, home)) as server:
        found = server.get("/api/v1/schedules", list[ScheduleInfo])
    if as_json:
        output.json_data(found)
    elif found:
        output.data(table(found, now_s=time.time()))
    else:
        output.message('no function has a schedule: @function(schedule="*/5 * * * *")')


def table(found: list[ScheduleInfo], *, now_s: float) -> str:
    rows = [
        (
            f"{info.function}@{info.version}",
            info.schedule,
            info.timezone,
            f"{format_utc(info.next_unix_ms)} (in {output.format_age(max(0.0, info.next_unix_ms / 1000 - now_s))})",
            format_utc(info.last_unix_ms) if info.last_unix_ms else "",
            f"{info.last} {info.status or 'not stored any more'}" if info.last else "",
        )
        for info in found
    ]
    return output.table(("FUNCTION", "SCHEDULE", "TIMEZONE", "NEXT", "LAST", "INVOCATION"), rows)
