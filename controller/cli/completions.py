"""Completions of arguments in a shell: names of functions, from the server, and of files, by the shell itself."""

from __future__ import annotations

import click
import msgspec
from click.shell_completion import CompletionItem

from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import FleetError

from .api_client import ApiClient, find_server
from .root import settle

TIMEOUT_S = 1.0
"""How long the server may take: someone waits at a prompt."""


class _Named(msgspec.Struct):
    name: str


def files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Leaves it to the shell to complete a path of a file or folder."""
    return [CompletionItem(incomplete, type="file")]


def function_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The functions whose names begin so; none if the server does not answer at once, or not this key."""
    top = ctx.find_root()
    settle(top, **top.params)
    with ctx.scope(cleanup=False):
        try:
            names = _names(ctx)
        except (FleetError, click.UsageError, OSError, *UNDECODABLE):
            return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def _names(ctx: click.Context) -> list[str]:
    with ApiClient(find_server(ctx.params.get("url"), ctx.find_root().obj)) as server, server.connection_errors():
        answer = server.http.get("/api/v1/functions", timeout=TIMEOUT_S)
        return [one.name for one in msgspec.json.decode(answer.content, type=list[_Named])]
