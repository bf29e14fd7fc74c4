"""`fs project`: groups of functions, with quotas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import click
import msgspec

from fleetstart.runtime.contract.errors import InvalidInput, NotFound
from fleetstart.runtime.contract.sizes import parse_size

from ...schemas.access import ProjectInfo, ProjectTerms
from .. import output
from ..api_client import ApiClient, find_server
from ..command_group import CommandGroup
from ..root import verb

NONE = "none"


@click.group(cls=CommandGroup, context_settings={"max_content_width": 100})
def command() -> None:
    """Projects group functions: keys, quotas, secrets and costs can be of one project. Each command has --json."""


@command.command
@click.argument("name")
@verb()
@click.pass_obj
def create(home: Path, *, name: str, url: str | None, as_json: bool) -> None:
    """Create a project; then: fs deploy handler.py --project NAME."""
    with ApiClient(find_server(url, home)) as server:
        if any(one.name == name for one in server.get("/api/v1/projects", list[ProjectInfo])):
            raise InvalidInput(f"project {name} exists already", hint="`fs project ls` shows it")
        _show(server.put(_path(name), ProjectTerms(), ProjectInfo), as_json=as_json)


@command.command
@verb()
@click.pass_obj
def ls(home: Path, *, url: str | None, as_json: bool) -> None:
    """List projects: functions, their largest number of workers and memory, what is in the store, and quotas."""
    with ApiClient(find_server(url, home)) as server:
        projects = server.get("/api/v1/projects", list[ProjectInfo])
    if as_json:
        output.json_data(projects)
    else:
        output.data(table(projects))


@command.command
@click.argument("name")
@click.option("--functions", metavar="N", help="Number of functions.")
@click.option("--workers", metavar="N", help="Number of workers: the sum of its functions' --max.")
@click.option("--memory", metavar="SIZE", help="Memory of these workers together, such as 64GiB.")
@click.option("--calls-per-s", metavar="N", help="Calls a second; more get 429 and when to try again.")
@click.option("--store", metavar="SIZE", help="Weights, code, packages and volumes in the object store.")
@click.option("--objects", metavar="N", help="Number of these objects.")
@click.option(
    "--network",
    type=click.Choice(["listed", "any"]),
    help="any: each deploy key may give functions the node's whole network (network=True).",
)
@verb()
@click.pass_obj
def quota(
    home: Path,
    *,
    name: str,
    functions: str | None,
    workers: str | None,
    memory: str | None,
    calls_per_s: str | None,
    store: str | None,
    objects: str | None,
    network: Literal["listed", "any"] | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Set quotas of a project; `none` removes one. Quotas that are not given stay.

    \b
    fs project quota ml --workers 16 --memory 64GiB --calls-per-s 100
    fs project quota ml --workers none
    fs project quota ml --network any
    """
    given = {
        "functions": _number(functions, "--functions", int),
        "workers": _number(workers, "--workers", int),
        "memory_bytes": _number(memory, "--memory", parse_size),
        "calls_per_s": _number(calls_per_s, "--calls-per-s", float),
        "store_bytes": _number(store, "--store", parse_size),
        "objects": _number(objects, "--objects", int),
    }
    with ApiClient(find_server(url, home)) as server:
        known = {one.name: one for one in server.get("/api/v1/projects", list[ProjectInfo])}
        if name not in known:
            from difflib import get_close_matches

            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"make it first: fs project create {name}"
            raise NotFound(f"project {name} does not exist", hint=hint)
        changes = {field: value[0] for field, value in given.items() if value is not None}
        quotas = msgspec.structs.replace(known[name].quotas, **changes)
        _show(server.put(_path(name), ProjectTerms(quotas=quotas, network=network), ProjectInfo), as_json=as_json)


@command.command
@click.argument("name")
@verb()
@click.pass_obj
def rm(home: Path, *, name: str, url: str | None, as_json: bool) -> None:
    """Remove a project without functions, secrets and keys."""
    with ApiClient(find_server(url, home)) as server:
        info = server.delete(_path(name), ProjectInfo)
    if as_json:
        output.json_data(info)
    else:
        output.message(f"project {info.name} is removed")


def table(projects: list[ProjectInfo]) -> str:
    rows = [
        (
            one.name,
            _of(str(len(one.functions)), one.quotas.functions),
            _of(str(one.workers), one.quotas.workers),
            _size_of(one.memory_bytes, one.quotas.memory_bytes),
            f"{one.quotas.calls_per_s:g}" if one.quotas.calls_per_s is not None else "",
            _size_of(one.store_bytes, one.quotas.store_bytes),
            _of("?" if one.objects is None else str(one.objects), one.quotas.objects),
            one.network,
            output.first_of(one.functions),
        )
        for one in projects
    ]
    headings = ("PROJECT", "FUNCTIONS", "MAX WORKERS", "THEIR MEMORY", "CALLS/S", "STORE", "OBJECTS", "NETWORK", "")
    return output.table(headings, rows)


def _of(have: str, quota: int | str | None) -> str:
    return have if quota is None else f"{have} of {quota}"


def _size_of(have_bytes: int | None, quota_bytes: int | None) -> str:
    have = "?" if have_bytes is None else output.format_size(have_bytes)
    return _of(have, None if quota_bytes is None else output.format_size(quota_bytes))


def _number(text: str | None, option: str, read: Callable[[str], float]) -> tuple[float | None] | None:
    """Parses a quota: None if it was not given; (None,) for no limit."""
    if text is None:
        return None
    if text == NONE:
        return (None,)
    try:
        return (read(text),)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is neither a number nor {NONE}", param_hint=option) from error


def _path(name: str) -> str:
    return f"/api/v1/projects/{quote(name, safe='')}"


def _show(info: ProjectInfo, *, as_json: bool) -> None:
    if as_json:
        output.json_data(info)
    else:
        output.data(table([info]))
