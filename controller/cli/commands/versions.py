"""`fs versions`: all versions of a function, and their share of its calls."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import click

from ...schemas.functions import VersionInfo
from .. import output
from ..api_client import ApiClient, find_server, function_path, suggest_function
from ..completions import function_names
from ..root import verb

ID_SHOWN = 12
ERROR_SHOWN = 60


@click.command
@click.argument("name", shell_complete=function_names)
@verb()
@click.pass_obj
def command(home: Path, *, name: str, url: str | None, as_json: bool) -> None:
    """List a function's versions, newest first, and what each is: live, its share of the calls, its aliases."""
    with ApiClient(find_server(url, home)) as server, suggest_function(server, name):
        versions = server.get(f"{function_path(name)}/versions", list[VersionInfo])
    if as_json:
        output.json_data(versions)
    else:
        output.data(versions_table(versions, now_s=time.time()))


def versions_table(versions: Iterable[VersionInfo], *, now_s: float) -> str:
    rows = [
        (
            str(info.version),
            ", ".join(info.roles) or "-",
            str(info.workers),
            output.format_age(max(0.0, now_s - info.deployed_unix_ms / 1000)),
            info.spec.bundle[:ID_SHOWN],
            info.spec.weights[:ID_SHOWN] if info.spec.weights else "-",
            info.error if len(info.error) <= ERROR_SHOWN else info.error[: ERROR_SHOWN - 1] + "…",
        )
        for info in versions
    ]
    return output.table(
        ("VERSION", "IS", "WORKERS", "AGE", "BUNDLE", "WEIGHTS", "ERROR"), rows, right=frozenset({0, 2, 3})
    )
