"""`fs logs`: what workers printed, and what the platform says about them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import click

from fleetstart.controller.cli import output
from fleetstart.controller.cli.client import Server, find_server, suggesting
from fleetstart.controller.cli.root import verb
from fleetstart.runtime.contract.errors import NotFound, Unavailable
from fleetstart.runtime.contract.ledger import LogLine

RECONNECT_S = 10.0
"""How long a followed log may be without its server: a controller is back within 5 s."""
PAUSE_S = 0.2


@click.command
@click.argument("name")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until ctrl-C.")
@click.option("--tail", default=100, show_default=True, type=click.IntRange(0, 100_000), help="Lines to begin with.")
@verb()
@click.pass_obj
def command(home: Path, *, name: str, follow: bool, tail: int, url: str | None, as_json: bool) -> None:
    """Show what a function's workers printed, oldest first."""
    with Server(find_server(url, home)) as server, suggesting(server, name):
        lines = _followed(server, name, tail) if follow else server.log_lines(name, tail=tail, follow=False)
        with suppress(KeyboardInterrupt):
            for line in lines:
                if as_json:
                    output.json_line(line)
                else:
                    output.data(shown(line))


def shown(line: LogLine) -> str:
    clock = datetime.fromtimestamp(line.unix_ms / 1000).strftime("%H:%M:%S.%f")[:-3]
    mark = {"stdout": " ", "stderr": "!", "system": "·"}[line.stream]
    return f"{clock} {line.worker}@{line.version} {mark} {line.text}"


def _followed(server: Server, name: str, tail: int) -> Iterator[LogLine]:
    """Over restarts of the controller: connects again, and leaves out what was shown."""
    last_ms = 0
    lost_at_s: float | None = None
    while True:
        seen_ms = last_ms
        try:
            for line in server.log_lines(name, tail=tail, follow=True):
                lost_at_s = None
                last_ms = max(last_ms, line.unix_ms)
                if line.unix_ms > seen_ms:
                    yield line
        except (output.Unreachable, NotFound, Unavailable) as error:
            if isinstance(error, NotFound) and not last_ms:
                raise
            # A controller that has just begun may answer before it knows its functions again.
            lost_at_s = lost_at_s or time.monotonic()
            if time.monotonic() - lost_at_s > RECONNECT_S:
                raise
        time.sleep(PAUSE_S)
        tail = 100
