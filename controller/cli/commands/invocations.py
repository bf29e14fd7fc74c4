"""`fs invocations`: async calls that wait, run or have ended, and what can be done about them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from urllib.parse import quote

import click
import msgspec

from fleetstart.runtime.contract.errors import NotFound

from ...schemas.invocations import InvocationInfo
from .. import output
from ..api_client import Server, error_of, find_server, suggesting
from ..command_group import Subverbs
from ..root import verb
from ..units import utc

STATUSES = ("queued", "running", "succeeded", "failed", "cancelled", "expired")


@click.group(cls=Subverbs, context_settings={"max_content_width": 100})
def command() -> None:
    """Calls that were made with `fs invoke --async`, by a schedule or by a replay, and those of functions with
    keep_requests=True. They are kept for a day after their end, or as long as their Fs-Ttl-S said. Each has --json.

    \b
    fs invocations ls --function chat --status failed
    fs invocations get inv-...         # state, progress, history, answer
    fs invocations ls --dead           # what the platform lost again and again
    fs invocations redrive inv-...     # once more
    fs replay inv-... --version 3      # its request again, as a call of its own
    """


@command.command
@click.option("--function", metavar="NAME", help="Of this function only.")
@click.option("--status", type=click.Choice(STATUSES), help="In this state only.")
@click.option("--dead", is_flag=True, help="Dead letters only: what failed because the platform did, again and again.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="The newest so many.")
@verb()
@click.pass_obj
def ls(
    home: Path, *, function: str | None, status: str | None, dead: bool, limit: int, url: str | None, as_json: bool
) -> None:
    """List what is kept, the newest first.

    \b
    fs invocations ls --status running
    fs invocations ls --function chat --limit 1000 --json
    """
    with Server(find_server(url, home)) as server:
        query: dict[str, str | int] = {"limit": limit, "dead": int(dead)}
        query |= {"function": function} if function else {}
        query |= {"status": status} if status else {}
        found = server.get("/api/v1/async", list[InvocationInfo], **query)
    if as_json:
        output.json_data(found)
    elif found:
        output.data(table(found, now_s=time.time()))
    else:
        output.say("no such invocation is kept; `fs invoke NAME --async` makes one")


@command.command
@click.argument("invocation")
@click.option("--result", "result_only", is_flag=True, help="Its answer alone, as it was given.")
@verb()
@click.pass_obj
def get(home: Path, *, invocation: str, result_only: bool, url: str | None, as_json: bool) -> int:
    """Show what has become of one.

    That is its state and progress, its history, its webhook, and its answer if that is small JSON. --result has exit
    code 1 if there is no answer yet, or if it is an error.

    \b
    fs invocations get inv-...
    fs invocations get inv-... --result > answer.png
    """
    with Server(find_server(url, home)) as server:
        if result_only:
            return write_result(server, invocation)
        show(kept(server, invocation), as_json=as_json)
    return output.OK


@command.command
@click.argument("invocation")
@verb()
@click.pass_obj
def cancel(home: Path, *, invocation: str, url: str | None, as_json: bool) -> None:
    """Cancel one, also while it runs: its worker stops working at it. One that has ended stays as it is.

    \b
    fs invocations cancel inv-...
    """
    with Server(find_server(url, home)) as server:
        show(server.change("POST", f"{path(invocation)}/cancel", None, InvocationInfo), as_json=as_json)


@command.command
@click.argument("invocation", required=False)
@click.option("--dead", metavar="NAME", help="All dead letters of this function instead.")
@verb()
@click.pass_obj
def redrive(home: Path, *, invocation: str | None, dead: str | None, url: str | None, as_json: bool) -> None:
    """Run once more what did not succeed.

    It keeps its id; what became of it before stays in its history. Synchronous calls are repeated with `fs replay`.

    \b
    fs invocations redrive inv-...
    fs invocations redrive --dead chat       # up to 1000 at a time
    """
    if (invocation is None) == (dead is None):
        raise click.UsageError("name an invocation, or a function whose dead letters are meant: --dead NAME")
    with Server(find_server(url, home)) as server:
        names = [invocation] if invocation is not None else []
        if dead is not None:
            with suggesting(server, dead):
                server.get(f"/api/v1/functions/{quote(dead, safe='')}", dict)
            query: dict[str, str | int] = {"function": dead, "dead": 1, "limit": 1000}
            names = [info.id for info in server.get("/api/v1/async", list[InvocationInfo], **query)]
        redriven = [server.change("POST", f"{path(name)}/redrive", None, InvocationInfo) for name in names]
    if as_json:
        output.json_data(redriven)
    elif redriven:
        output.data("\n".join(info.id for info in redriven))
    else:
        output.say(f"{dead} has no dead letters")


def path(invocation: str) -> str:
    return f"/api/v1/invocations/{quote(invocation, safe='')}"


def kept(server: Server, invocation: str) -> InvocationInfo:
    """Errors: NotFound, also for a synchronous call of which only the trace is left."""
    found = server.get(path(invocation), dict[str, msgspec.Raw])
    if "status" not in found:
        raise NotFound(
            f"{invocation} was a synchronous call, and its request is not kept",
            hint="`fs trace` shows its timeline; functions with keep_requests=True have their calls kept",
        )
    return msgspec.json.decode(msgspec.json.encode(found), type=InvocationInfo)


def write_result(server: Server, invocation: str) -> int:
    """The kept answer on stdout; a line on stderr if there is none yet."""
    with server.reached():
        response = server.http.get(f"{path(invocation)}/result")
    if response.headers.get("fs-error") or response.status_code == 404:
        raise error_of(response.status_code, response.content)
    if response.status_code == 202 and response.headers.get("location"):
        output.say(f"{invocation} has not ended yet")
        return output.FAILED
    sys.stdout.buffer.write(response.content)
    sys.stdout.buffer.flush()
    return output.FAILED if response.is_error else output.OK


def show(info: InvocationInfo, *, as_json: bool) -> None:
    if as_json:
        output.json_data(info)
        return
    facts = [f"{info.id}  {info.method} {info.target}  {state(info)}"]
    facts += [f"  {utc(moment.unix_ms)}  {moment.what}" for moment in info.history]
    if info.progress is not None:
        facts.append(
            f"  {utc(info.progress.unix_ms)}  {info.progress.fraction:.0%}: {info.progress.message}".rstrip(": ")
        )
    if info.error is not None:
        facts.append(f"  error: {info.error.message}")
    if info.http_status:
        cost = f", ${info.cost}" if info.cost else ""
        facts.append(
            f"  HTTP {info.http_status}, {output.size(info.result_bytes)} {info.content_type}, version "
            f"{info.version}, {info.start} start, billed {info.billed_ms} ms{cost}"
        )
    if info.delivery is not None:
        said = info.delivery.error or (f"HTTP {info.delivery.http_status}" if info.delivery.http_status else "")
        facts.append(f"  webhook {info.delivery.state} after {info.delivery.tries} tries{f': {said}' if said else ''}")
    output.data("\n".join(facts))
    if not isinstance(info.result, msgspec.UnsetType):
        output.data(bytes(info.result).decode())


def state(info: InvocationInfo) -> str:
    if info.dead_letter:
        return "failed, a dead letter"
    if info.status == "running" and info.progress is not None and not info.cancelling:
        return f"running, {info.progress.fraction:.0%}"
    return f"{info.status}, to be cancelled" if info.cancelling else info.status


def table(found: list[InvocationInfo], *, now_s: float) -> str:
    rows = [
        (
            info.id,
            info.function,
            state(info),
            info.origin,
            output.age(max(0.0, now_s - info.accepted_unix_ms / 1000)),
            str(info.http_status or ""),
            f"${info.cost}" if info.cost else "",
            info.delivery.state if info.delivery is not None else "",
        )
        for info in found
    ]
    headings = ("INVOCATION", "FUNCTION", "STATE", "FROM", "AGE", "HTTP", "COST", "WEBHOOK")
    return output.table(headings, rows, right=frozenset({4, 5, 6}))
