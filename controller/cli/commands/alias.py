"""`fs alias`: aliases of versions, such as prod and staging."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import click

from ...schemas.functions import Traffic
from .. import output
from ..api_client import ApiClient, find_server, function_path, suggest_function
from ..completions import function_names
from ..rollout import describe_traffic, version_or_alias
from ..root import verb


@click.command
@click.argument("name", shell_complete=function_names)
@click.argument("alias", required=False)
@click.argument("version", required=False, metavar="[VERSION|ALIAS]")
@click.option("--rm", "remove", is_flag=True, help="Remove the alias; its version stays.")
@verb()
@click.pass_obj
def command(
    home: Path, *, name: str, alias: str | None, version: str | None, remove: bool, url: str | None, as_json: bool
) -> None:
    """Show a function's aliases, or point one at a version: /fn/NAME@ALIAS then calls that one.

    \b
    fs alias hello                 # list all
    fs alias hello prod 3          # set or move one; `live` is an alias, too
    fs alias hello prod --rm
    """
    if remove == (version is not None) and alias is not None:
        raise click.UsageError(f"give a version for {alias}, or --rm" if not remove else "--rm takes no version")
    if remove and alias is None:
        raise click.UsageError("--rm which? fs alias NAME ALIAS --rm")
    with ApiClient(find_server(url, home)) as server, suggest_function(server, name):
        path = f"{function_path(name)}/aliases/{quote(alias or '', safe='')}"
        if alias is None:
            traffic = server.get(f"{function_path(name)}/traffic", Traffic)
        elif remove:
            traffic = server.send_once("DELETE", path, None, Traffic)
        else:
            traffic = server.send_once("PUT", path, {"version": version_or_alias(version or "")}, Traffic)
    if as_json:
        output.json_data({"live": traffic.live, **traffic.aliases})
    else:
        rows = [(name, str(version)) for name, version in {"live": traffic.live, **traffic.aliases}.items()]
        output.data(output.table(("ALIAS", "VERSION"), rows, right=frozenset({1})))
    if alias is not None:
        output.message(describe_traffic(traffic))
