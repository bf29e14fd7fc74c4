"""`fs trace`: the timeline of one invocation as a waterfall chart."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import click

from fleetstart.runtime.contract.billing.ledger import InvocationRow, InvocationTrace
from fleetstart.runtime.contract.errors import FleetError, NotFound

from ...schemas.functions import FunctionInfo
from .. import output
from ..api_client import ApiClient, find_server, suggest_function
from ..completions import function_names
from ..root import verb
from ..waterfall import render_trace
from .ls import failed_start_line


@click.command
@click.argument("which", metavar="INVOCATION|NAME", shell_complete=function_names)
@verb()
@click.pass_obj
def command(home: Path, *, which: str, url: str | None, as_json: bool) -> None:
    """Show the timeline of an invocation, or of a function's latest."""
    with ApiClient(find_server(url, home)) as server:
        trace = find_trace(server, which)
        failed = "" if as_json else _failed_start(server, trace.row.function)
    if as_json:
        output.json_data(trace)
        return
    output.data(render_trace(trace, width=shutil.get_terminal_size((100, 24)).columns))
    if failed:
        output.message(failed)


def _failed_start(server: ApiClient, function: str) -> str:
    """The line on the function's last failed start; "" without one, or if the function is gone."""
    with suppress(FleetError):
        info = server.get(f"/api/v1/functions/{quote(function, safe='')}", FunctionInfo)
        return failed_start_line(info, now_s=time.time())
    return ""


def find_trace(server: ApiClient, which: str) -> InvocationTrace:
    """The trace of an invocation, or of the latest of a function. Errors: NotFound."""
    try:
        return server.get(f"/api/v1/invocations/{quote(which, safe='')}", InvocationTrace)
    except NotFound:
        if which.startswith("inv-"):
            raise
    with suggest_function(server, which):
        info = server.get(f"/api/v1/functions/{quote(which, safe='')}", FunctionInfo)
    rows = server.get("/api/v1/invocations", list[InvocationRow], function=which, limit=1)
    if not rows:
        failed = failed_start_line(info, now_s=time.time())
        raise NotFound(f"{which} was never called", hint=failed or f"call it: fs invoke {which}")
    return server.get(f"/api/v1/invocations/{rows[0].id}", InvocationTrace)
