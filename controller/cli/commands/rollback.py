"""`fs rollback`: rolls back to a version that was live before."""

from __future__ import annotations

from pathlib import Path

import click

from ...schemas.functions import Traffic
from .. import output
from ..api_client import ApiClient, find_server, function_path, suggest_function
from ..completions import function_names
from ..rollout import describe_traffic, version_or_alias
from ..root import verb


@click.command
@click.argument("name", shell_complete=function_names)
@click.argument("version", required=False, metavar="[VERSION|ALIAS]")
@verb()
@click.pass_obj
def command(home: Path, *, name: str, version: str | None, url: str | None, as_json: bool) -> None:
    """Roll back to a version that was live before, at once and without a probe.

    Without a VERSION the last change is undone: a rollout in progress, a canary, or the last deploy. Prints the version
    that is live then.
    """
    body = {"version": version_or_alias(version)} if version is not None else None
    with ApiClient(find_server(url, home)) as server, suggest_function(server, name):
        traffic = server.send_once("POST", f"{function_path(name)}/rollback", body, Traffic)
    output.message(describe_traffic(traffic))
    if as_json:
        output.json_data(traffic)
    else:
        output.data(str(traffic.live))
