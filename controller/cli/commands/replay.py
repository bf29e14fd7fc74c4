"""`fs replay`: repeats a past call at the live version or another one, and compares the answers."""

from __future__ import annotations

import contextlib
import difflib
from pathlib import Path

import click
import msgspec

from ...schemas.invocations import InvocationInfo, ReplayTerms
from .. import output
from ..api_client import ApiClient, find_server
from ..invocation.async_invoke import get_invocation, invocation_path, wait_for_end
from ..rollout import version_or_alias
from ..root import verb

SHOWN_LINES = 40
"""Lines of a difference that are shown."""


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`."""

    past: InvocationInfo
    now: InvocationInfo
    same_status: bool
    same_answer: bool
    difference: list[str]


@click.command
@click.argument("invocation")
@click.option("--version", "at", metavar="VERSION|ALIAS", help="Version to call; default: the live one.")
@click.option("--timeout", "timeout_s", default=300.0, show_default=True, metavar="SECONDS", type=float)
@verb()
@click.pass_obj
def command(home: Path, *, invocation: str, at: str | None, timeout_s: float, url: str | None, as_json: bool) -> int:
    """Repeat a past call with the same request, and compare the answers. Exit code 1 if they differ.

    Requests are stored of async calls, and of all calls of functions with keep_requests=True.

    \b
    fs replay inv-0123456789abcdef0123
    fs replay inv-0123456789abcdef0123 --version 3
    """
    with ApiClient(find_server(url, home)) as server:
        past = get_invocation(server, invocation)
        terms = ReplayTerms(version=version_or_alias(at) if at else None)
        begun = server.send_once("POST", f"{invocation_path(invocation)}/replay", terms, InvocationInfo)
        now = wait_for_end(server, begun.id, timeout_s=timeout_s)
        before, after = (comparable(_answer(server, info), info.id) for info in (past, now))
    shown = ReplayResult(
        past=past,
        now=now,
        same_status=past.http_status == now.http_status,
        same_answer=before == after,
        difference=difference(before, after),
    )
    same = shown.same_status and shown.same_answer
    if as_json:
        output.json_data(shown)
    else:
        for info in (past, now):
            output.message(f"{info.id}  version {info.version}, HTTP {info.http_status}, billed {info.billed_ms} ms")
        output.data("the answers are the same" if same else "\n".join(shown.difference[:SHOWN_LINES]))
    return output.OK if same else output.FAILED


def _answer(server: ApiClient, info: InvocationInfo) -> bytes:
    with server.connection_errors():
        return server.http.get(f"{invocation_path(info.id)}/result").content


def comparable(answer: bytes, id: str) -> bytes:
    """The answer without what differs between any two calls: the invocation's id, and the bill that ends a stream."""
    events = answer.split(b"\n\n")
    kept = [event for event in events if not event.startswith(b"event: fleetstart\n")]
    return b"\n\n".join(kept).replace(id.encode(), b"INVOCATION")


def difference(before: bytes, after: bytes) -> list[str]:
    """Line by line; JSON is laid out first."""
    if before == after:
        return []
    return list(difflib.unified_diff(_lines(before), _lines(after), "then", "now", lineterm="", n=1)) or [
        f"{len(before):,} bytes then, {len(after):,} now"
    ]


def _lines(data: bytes) -> list[str]:
    with contextlib.suppress(msgspec.DecodeError):
        data = msgspec.json.format(data, indent=2)
    return data.decode(errors="replace").splitlines()
