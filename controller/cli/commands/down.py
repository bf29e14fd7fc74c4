"""`fs down`: stops the supervisor with SIGTERM, and with SIGKILL if it does not end."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import click

from fleetstart.runtime.contract.errors import FleetError

from .. import output
from ..home import HomeLayout, clean_if_free, read_services, read_supervisor, start_ticks
from ..local.services import CONTROLLER, NODE, REDIS
from ..root import verb

DEADLINE_S = 30.0
"""Longer than a service takes to end, or what comes between two, beside the grace period that it has said."""
KILLED_S = 5.0
POLL_S = 0.02
SILENT_S = 1.0
"""What takes longer is explained; without calls in progress it takes half of it."""
REASONS = {
    CONTROLLER: "it lets the calls in progress end",
    NODE: "it lets its workers end",
    REDIS: "it writes its data to the disk",
}


@click.command
@click.option("--now", is_flag=True, help="Do not wait for calls in progress: they end with an error.")
@verb(server=False)
@click.pass_obj
def command(home: Path, *, now: bool, as_json: bool) -> None:
    """Stop everything that `fs up` started. Deployed functions stay for the next `fs up`.

    Calls in progress have ten seconds to end, or as long as FS_DRAIN_S says. Asynchronous calls that have not ended go
    on after the next `fs up`.
    """
    began_s = time.monotonic()
    try:
        stopped = stop_supervisor(HomeLayout(home), now=now)
    except KeyboardInterrupt:
        output.message("it goes on stopping in the background; `fs down --now` ends it at once")
        raise
    output.message("down" if stopped else f"nothing runs in {home}")
    if as_json:
        output.json_data({"stopped": stopped, "took_s": round(time.monotonic() - began_s, 3)})


def stop_supervisor(layout: HomeLayout, *, now: bool = False) -> bool:
    """Stops the system of a home; returns whether it ran. Nothing runs when this returns.

    `now` ends the grace period of each service at once.

    Errors: FleetError if the supervisor outlives even SIGKILL.
    """
    if not layout.lock.exists() or clean_if_free(layout):
        return False
    # A supervisor that took the lock a moment ago has not written its record yet.
    ends = time.monotonic() + KILLED_S
    while (record := read_supervisor(layout)) is None or start_ticks(record.pid) != record.start_ticks:
        if clean_if_free(layout):
            return False
        if time.monotonic() > ends:
            raise FleetError(
                f"{layout.lock} is held by a process that it does not name",
                hint=f"`fuser {layout.lock}` tells which; end it, and run `fs down` again",
            )
        time.sleep(POLL_S)
    explained = time.monotonic() + SILENT_S, ""
    for number, wait_s in ((signal.SIGTERM, DEADLINE_S), (signal.SIGKILL, KILLED_S)):
        waited = ""
        # One that stops already takes another SIGTERM as the end of its calls' time; another `fs down` waits for it.
        # The pid may be another process's by now, if the supervisor died.
        stops = number == signal.SIGTERM and _stopping(layout) is not None
        if not stops and start_ticks(record.pid) == record.start_ticks:
            with suppress(ProcessLookupError):
                os.kill(record.pid, number)
        ends = time.monotonic() + wait_s
        while time.monotonic() < ends:
            stopping = _stopping(layout)
            if stopping is not None and stopping[0] != waited and number == signal.SIGTERM:
                waited, ends = stopping[0], time.monotonic() + stopping[1] + DEADLINE_S
            if now and stopping and start_ticks(record.pid) == record.start_ticks:
                with suppress(ProcessLookupError):
                    os.kill(record.pid, signal.SIGTERM)  # each signal but the first ends a grace period
            explained = _explain(stopping, *explained)
            # The lock is free a moment before its holder has ended.
            if clean_if_free(layout) and start_ticks(record.pid) != record.start_ticks:
                return True
            time.sleep(POLL_S)
    raise FleetError(f"process {record.pid} does not end", hint=f"see {layout.log('supervisor')}")


def _stopping(layout: HomeLayout) -> tuple[str, float] | None:
    """The service that is being stopped, and the time it may take."""
    found = ((name, record.stopping_s) for name, record in read_services(layout).items() if record.stopping_s)
    return next(found, None)


def _explain(stopping: tuple[str, float] | None, silent_until_s: float, explained: str) -> tuple[float, str]:
    """Says what is waited for, once a service; returns what it is called with the next time."""
    if time.monotonic() > silent_until_s and stopping is not None and stopping[0] != explained:
        name, most_s = stopping
        output.message(
            f"waiting for the {name}, at most {most_s:.0f} s: {REASONS[name]}; `fs down --now` does not wait"
        )
        return silent_until_s, name
    return silent_until_s, explained
