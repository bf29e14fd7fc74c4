"""`fs trace`: where the time of one invocation went, as a chart."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import click

from fleetstart.runtime.contract.billing.ledger import InvocationRow, InvocationTrace, dollars
from fleetstart.runtime.contract.errors import NotFound

from ...schemas.functions import FunctionInfo
from .. import output
from ..api_client import Server, find_server, suggesting
from ..root import verb
from ..waterfall import waterfall


@click.command
@click.argument("which", metavar="INVOCATION|NAME")
@verb()
@click.pass_obj
def command(home: Path, *, which: str, url: str | None, as_json: bool) -> None:
    """Show where the time of an invocation went: this one, or the latest of a function."""
    with Server(find_server(url, home)) as server:
        trace = find(server, which)
    if as_json:
        output.json_data(trace)
    else:
        output.data(shown(trace, width=shutil.get_terminal_size((100, 24)).columns))


def shown(trace: InvocationTrace, *, width: int) -> str:
    row = trace.row
    bill = f"billed {row.billed_ms} ms of {output.size(row.memory_bytes)} = ${dollars(row.cost_nusd)}"
    waived = f"waited {row.queue_ms} ms, not billed"
    chart = waterfall(trace.timeline.phases, width=width)
    spans = f"\ntrace {trace.context.trace_id}" if trace.context.trace_id else ""
    return f"{summary(trace)}\n\n{chart}\n\n{bill}; {waived}{spans}"


def summary(trace: InvocationTrace) -> str:
    """What call it was, and what it came to, on one line."""
    row = trace.row
    outcome = f"HTTP {row.status}" + (f" {row.error}" if row.error else "")
    worker = f"worker {row.worker or 'none'}{', pooled' if trace.pooled else ''}"
    facts = [f"{row.function}@{row.version}", f"{row.start} start", outcome, worker]
    if trace.relayed:
        facts.append(f"{stages(trace.relayed)} reached through the object store")
    if trace.fetched:
        facts.append(", ".join(f"{output.size(count)} from the {source}" for source, count in trace.fetched.items()))
    if row.attempts > 1:
        facts.append(f"{row.attempts} attempts")
    return f"{row.id}   {', '.join(facts)}"


def stages(indices: Sequence[int]) -> str:
    return f"stage{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def find(server: Server, which: str) -> InvocationTrace:
    """Of this invocation, or of the latest of the function of that name. Errors: NotFound."""
    try:
        return server.get(f"/api/v1/invocations/{quote(which, safe='')}", InvocationTrace)
    except NotFound:
        if which.startswith("inv-"):
            raise
    with suggesting(server, which):
        server.get(f"/api/v1/functions/{quote(which, safe='')}", FunctionInfo)
    rows = server.get("/api/v1/invocations", list[InvocationRow], function=which, limit=1)
    if not rows:
        raise NotFound(f"{which} was never called", hint=f"call it: fs invoke {which}")
    return server.get(f"/api/v1/invocations/{rows[0].id}", InvocationTrace)
