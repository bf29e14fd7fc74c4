"""`fs invocations`: lists, shows, cancels and redrives stored invocations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import click

from fleetstart.runtime.contract.errors import InvalidInput, NotFound

from ...schemas.invocations import InvocationInfo
from .. import output
from ..api_client import ApiClient, find_server, require_function
from ..command_group import CommandGroup
from ..invocation.async_invoke import describe_state, get_invocation, invocation_path, print_invocation, print_result
from ..root import verb

STATUSES = ("queued", "running", "succeeded", "failed", "cancelled", "expired")


@click.group(cls=CommandGroup, context_settings={"max_content_width": 100})
def command() -> None:
    """Stored invocations: async calls (`fs invoke --async`, schedules, replays), and calls of functions with
    keep_requests=True. They are stored for a day after their end, or as long as Fs-Ttl-S says. Each command has --json.

    \b
    fs invocations ls --function chat --status failed
    fs invocations get inv-...         # state, progress, history, answer
    fs invocations ls --dead           # dead letters
    fs invocations redrive inv-...     # run it again
    fs replay inv-... --version 3      # repeat its request as a new call
    """


@command.command
@click.option("--function", metavar="NAME", help="Only of this function.")
@click.option("--status", type=click.Choice(STATUSES), help="Only in this state.")
@click.option(
    "--dead", is_flag=True, help="Only dead letters: those that failed repeatedly through faults of the platform."
)
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Number of invocations.")
@verb()
@click.pass_obj
def ls(
    home: Path, *, function: str | None, status: str | None, dead: bool, limit: int, url: str | None, as_json: bool
) -> None:
    """List stored invocations, newest first.

    \b
    fs invocations ls --status running
    fs invocations ls --function chat --limit 1000 --json
    """
    with ApiClient(find_server(url, home)) as server:
        query: dict[str, str | int] = {"limit": limit, "dead": int(dead)}
        query |= {"function": function} if function else {}
        query |= {"status": status} if status else {}
        found = server.get("/api/v1/async", list[InvocationInfo], **query)
        if function and not found:
            require_function(server, function)
    if as_json:
        output.json_data(found)
    elif found:
        output.data(table(found, now_s=time.time()))
    else:
        output.message("no such invocation is stored; `fs invoke NAME --async` makes one")


@command.command
@click.argument("invocation")
@click.option("--result", "result_only", is_flag=True, help="Print only its answer, unchanged.")
@verb()
@click.pass_obj
def get(home: Path, *, invocation: str, result_only: bool, url: str | None, as_json: bool) -> int:
    """Show an invocation: state, progress, history, webhook, and its answer if that is small JSON.

    With --result the exit code is 1 if there is no answer yet, or if it is an error.

    \b
    fs invocations get inv-...
    fs invocations get inv-... --result > answer.png
    """
    with ApiClient(find_server(url, home)) as server:
        if result_only:
            return print_result(server, invocation, unchanged=True)
        print_invocation(get_invocation(server, invocation), as_json=as_json)
    return output.OK


@command.command
@click.argument("invocation", required=False)
@click.option("--queued", metavar="NAME", help="Cancel all of this function that wait.")
@verb()
@click.pass_obj
def cancel(home: Path, *, invocation: str | None, queued: str | None, url: str | None, as_json: bool) -> None:
    """Cancel an invocation, even while it runs: its worker aborts it. One that has ended stays as it is.

    \b
    fs invocations cancel inv-...
    fs invocations cancel --queued chat      # all that wait; those that run go on
    """
    if (invocation is None) == (queued is None):
        raise click.UsageError("name an invocation, or a function whose waiting ones are meant: --queued NAME")
    with ApiClient(find_server(url, home)) as server:

        def cancel_one(name: str) -> InvocationInfo:
            return server.send_once("POST", f"{invocation_path(name)}/cancel", None, InvocationInfo)

        def waiting() -> list[str]:
            query: dict[str, str | int] = {"function": queued or "", "status": "queued", "limit": 1000}
            return [info.id for info in server.get("/api/v1/async", list[InvocationInfo], **query)]

        if invocation is not None:
            print_invocation(cancel_one(invocation), as_json=as_json)
            return
        require_function(server, queued or "")
        cancelled = list[InvocationInfo]()
        for info in cancelled_of(waiting, cancel_one):
            cancelled.append(info)
            if not as_json:
                output.data(info.id)
    if as_json:
        output.json_data(cancelled)
    elif not cancelled:
        output.message(f"no invocation of {queued} waits")


def cancelled_of(
    waiting: Callable[[], list[str]], cancel_one: Callable[[str], InvocationInfo]
) -> Iterator[InvocationInfo]:
    """Cancels what waits, a list at a time, until nothing does that was not tried yet; yields what was cancelled. One
    that has begun since it was listed is cancelled, too; one that has ended stays as it is."""
    tried = set[str]()
    while names := [name for name in waiting() if name not in tried]:
        tried.update(names)
        for name in names:
            with suppress(NotFound):
                if (info := cancel_one(name)).cancelling or info.status == "cancelled":
                    yield info


@command.command
@click.argument("invocation", required=False)
@click.option("--dead", metavar="NAME", help="Redrive all dead letters of this function.")
@verb()
@click.pass_obj
def redrive(home: Path, *, invocation: str | None, dead: str | None, url: str | None, as_json: bool) -> None:
    """Run an invocation that did not succeed again.

    It keeps its id and its history. Synchronous calls are repeated with `fs replay`.

    \b
    fs invocations redrive inv-...
    fs invocations redrive --dead chat       # up to 1000 at a time
    """
    if (invocation is None) == (dead is None):
        raise click.UsageError("name an invocation, or a function whose dead letters are meant: --dead NAME")
    with ApiClient(find_server(url, home)) as server:
        names = [invocation] if invocation is not None else []
        if dead is not None:
            require_function(server, dead)
            query: dict[str, str | int] = {"function": dead, "dead": 1, "limit": 1000}
            names = [info.id for info in server.get("/api/v1/async", list[InvocationInfo], **query)]

        def queue_again(name: str) -> InvocationInfo:
            return server.send_once("POST", f"{invocation_path(name)}/redrive", None, InvocationInfo)

        redriven, refusals = ([queue_again(names[0])], []) if dead is None else redriven_of(names, queue_again)
    for refusal in refusals:
        output.message(f"passed over: {refusal}")
    if as_json:
        output.json_data(redriven)
    elif redriven:
        output.data("\n".join(info.id for info in redriven))
    elif not refusals:
        output.message(f"{dead} has no dead letters")


def redriven_of(
    names: list[str], queue_again: Callable[[str], InvocationInfo]
) -> tuple[list[InvocationInfo], list[str]]:
    """Queues dead letters again; returns those, and why others could not be: another redrive of all may have been
    sooner, or they are kept no longer."""
    redriven, refusals = list[InvocationInfo](), list[str]()
    for name in names:
        try:
            redriven.append(queue_again(name))
        except (InvalidInput, NotFound) as error:
            refusals.append(error.message)
    return redriven, refusals


def table(found: list[InvocationInfo], *, now_s: float) -> str:
    rows = [
        (
            info.id,
            info.function,
            describe_state(info),
            info.origin,
            output.format_age(max(0.0, now_s - info.accepted_unix_ms / 1000)),
            str(info.http_status or ""),
            f"${info.cost}" if info.cost else "",
            info.delivery.state if info.delivery is not None else "",
        )
        for info in found
    ]
    headings = ("INVOCATION", "FUNCTION", "STATE", "FROM", "AGE", "HTTP", "COST", "WEBHOOK")
    return output.table(headings, rows, right=frozenset({4, 5, 6}))
