"""`fs split`: splits a function's calls over versions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ...schemas.functions import Share, Traffic
from .. import output
from ..api_client import ApiClient, find_server, function_path, suggest_function
from ..completions import function_names
from ..rollout import describe_traffic, version_or_alias
from ..root import verb


@click.command
@click.argument("name", shell_complete=function_names)
@click.argument("shares", nargs=-1, metavar="[VERSION=PERCENT]...")
@verb()
@click.pass_obj
def command(home: Path, *, name: str, shares: Sequence[str], url: str | None, as_json: bool) -> None:
    """Show how a function's calls are split over versions, or split them; the shares must add up to 100.

    \b
    fs split hello 3=90 4=10       # a tenth of the calls to version 4
    fs split hello 4=100           # all calls: 4 is live

    Calls to a version or an alias are not affected.
    """
    wanted = [_share(text) for text in shares]
    with ApiClient(find_server(url, home)) as server, suggest_function(server, name):
        if wanted:
            traffic = server.send_once("PUT", f"{function_path(name)}/split", wanted, Traffic)
            output.message(describe_traffic(traffic))
        else:
            traffic = server.get(f"{function_path(name)}/traffic", Traffic)
    split = traffic.split or [Share(version=traffic.live, percent=100)]
    if as_json:
        output.json_data(split)
    else:
        rows = [(str(share.version), f"{share.percent}%") for share in split]
        output.data(output.table(("VERSION", "CALLS"), rows, right=frozenset({0, 1})))


def _share(text: str) -> Share:
    version, equals, percent = text.rpartition("=")
    number = percent.removesuffix("%")
    if not equals or not version or not (number.isascii() and number.isdecimal() and len(number) <= 3):
        raise click.UsageError(f"{text!r} is not VERSION=PERCENT, for example 3=90")
    return Share(version=version_or_alias(version), percent=int(number))
