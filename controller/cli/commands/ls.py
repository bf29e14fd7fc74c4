"""`fs ls`: lists functions, one a line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from ...schemas.functions import FunctionInfo
from .. import output
from ..api_client import ApiClient, find_server
from ..root import verb


@click.command
@verb()
@click.pass_obj
def command(home: Path, *, url: str | None, as_json: bool) -> None:
    """List functions by name: live version, workers, calls, URL."""
    with ApiClient(find_server(url, home)) as server:
        functions = server.get("/api/v1/functions", list[FunctionInfo])
    if as_json:
        output.json_data(functions)
    elif functions:
        output.data(functions_table(functions, now_s=time.time()))
    else:
        output.message("no function is deployed yet: fs deploy handler.py")


def functions_table(functions: Sequence[FunctionInfo], *, now_s: float) -> str:
    rows = [
        (
            info.name,
            str(info.version),
            _workers(info),
            str(info.running),
            str(info.queued),
            output.format_age(max(0.0, now_s - info.deployed_unix_ms / 1000)),
            info.url,
        )
        for info in functions
    ]
    headings = ("FUNCTION", "VERSION", "WORKERS", "RUNNING", "QUEUED", "AGE", "URL")
    lines = [output.table(headings, rows, right=frozenset({1, 3, 4, 5}))]
    lines += [
        f"{info.name}: {info.async_calls:,} async calls wait or run" for info in functions if info.async_calls > 1
    ]
    lines += [line for info in functions if (line := failed_start_line(info, now_s=now_s))]
    return "\n".join(lines)


def failed_start_line(info: FunctionInfo, *, now_s: float) -> str:
    """When and why the last start failed, if none has succeeded since: "hello: its last start failed 3m ago: …"."""
    failed = info.last_failure
    if failed is None:
        return ""
    age = output.format_age(max(0.0, now_s - failed.unix_ms / 1000))
    return f"{info.name}: its last start failed {age} ago: {output.on_one_line(failed.error.message)}"


def _workers(info: FunctionInfo) -> str:
    """Describes workers: "2 ready, 1 starting"; "scaled to zero" without any, "broken" after too many failed starts,
    "failed to start" as long as none has succeeded."""
    if info.broken is not None:
        return f"broken: {info.broken.code}"
    states = Counter(worker.state for worker in info.workers if worker.state not in ("gone", "failed"))
    return ", ".join(f"{count} {state}" for state, count in states.items()) or (
        "failed to start" if info.last_failure is not None else "scaled to zero"
    )
