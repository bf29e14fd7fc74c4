"""`fs rm`: removes a function; its bill stays in the ledger."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import quote

import click

from ...schemas.functions import FunctionInfo
from .. import output
from ..api_client import ApiClient, find_server, suggest_function
from ..completions import function_names
from ..root import verb


@click.command
@click.argument("name", shell_complete=function_names)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@verb()
@click.pass_obj
def command(home: Path, *, name: str, yes: bool, url: str | None, as_json: bool) -> None:
    """Remove a function. Calls under way are finished; its invocations stay on the bill."""
    path = f"/api/v1/functions/{quote(name, safe='')}"
    with ApiClient(find_server(url, home)) as server, suggest_function(server, name):
        info = server.get(path, FunctionInfo)
        if not yes:
            if not sys.stdin.isatty():
                raise click.UsageError(f"fs rm {name} asks for confirmation; give --yes if stdin is not a terminal")
            click.confirm(f"Remove {info.name}, version {info.version}, with {len(info.workers)} workers?", abort=True)
        info = server.delete(path, FunctionInfo)
    output.message(f"{info.name} removed")
    if as_json:
        output.json_data(info)
