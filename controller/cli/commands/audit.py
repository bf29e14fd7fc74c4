"""`fs audit`: the audit log of changes and rejected requests."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ...schemas.access import AuditEvent
from .. import output
from ..api_client import ApiClient, find_server
from ..root import verb
from ..units import format_utc, parse_unix_ms


@click.command
@click.option("--since", default="7d", show_default=True, metavar="AGE|DATE", help="90s, 15m, 24h, 7d or 2026-01-31.")
@click.option("--by", default="", metavar="KEY", help="Only of this key; `local`: without a key.")
@click.option(
    "--limit", default=1000, show_default=True, type=click.IntRange(1, 10_000), help="Number of events, newest first."
)
@verb()
@click.pass_obj
def command(home: Path, *, since: str, by: str, limit: int, url: str | None, as_json: bool) -> None:
    """Show the audit log: who changed what, when, from where, with which result; oldest first.

    Rejected requests are included. Digests of the object show whether it changed. Needs a key with scope admin.
    """
    since_unix_ms = max(0, parse_unix_ms(since, now_s=time.time(), option="--since"))
    with ApiClient(find_server(url, home)) as server:
        events = server.get("/api/v1/audit", list[AuditEvent], since_unix_ms=since_unix_ms, by=by, limit=limit)
    events.reverse()
    if as_json:
        output.json_data(events)
    elif events:
        output.data(table(events))
    else:
        output.message("no events in that time")


def table(events: list[AuditEvent]) -> str:
    rows = [
        (
            format_utc(event.unix_ms),
            event.by or "nobody",
            event.address,
            event.verb + (f" ×{event.times}" if event.times > 1 else ""),
            event.object,
            f"{event.status} {event.code}".strip(),
            _change(event),
        )
        for event in events
    ]
    return output.table(("WHEN", "WHO", "FROM", "DID", "TO WHAT", "RESULT", "CHANGE"), rows)


def _change(event: AuditEvent) -> str:
    if event.before == event.after:
        return ""
    return f"{event.before or 'nothing'} → {event.after or 'nothing'}"
