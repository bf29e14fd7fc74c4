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
from ..home import HomeLayout, SupervisorRecord, read_record, start_ticks, try_lock
from ..root import verb

DEADLINE_S = 45.0
"""Longer than the grace periods of controller, node and Redis together."""
KILLED_S = 5.0
POLL_S = 0.02


@click.command
@verb(server=False)
@click.pass_obj
def command(home: Path, *, as_json: bool) -> None:
    """Stop everything that `fs up` started. Deployed functions stay for the next `fs up`."""
    stopped = stop_supervisor(HomeLayout(home))
    output.message("down" if stopped else f"nothing runs in {home}")
    if as_json:
        output.json_data({"stopped": stopped})


def stop_supervisor(layout: HomeLayout) -> bool:
    """Stops the system of a home; returns whether it ran. Nothing runs when this returns.

    Errors: FleetError if the supervisor outlives even SIGKILL.
    """
    if not layout.lock.exists() or _clean_if_free(layout):
        return False
    # A supervisor that took the lock a moment ago has not written its record yet.
    ends = time.monotonic() + KILLED_S
    while (record := read_record(layout.supervisor, SupervisorRecord)) is None:
        if _clean_if_free(layout):
            return False
        if time.monotonic() > ends:
            raise FleetError(f"{layout.lock} is held, but {layout.supervisor} does not say by whom")
        time.sleep(POLL_S)
    for number, wait_s in ((signal.SIGTERM, DEADLINE_S), (signal.SIGKILL, KILLED_S)):
        # The pid may be another process's by now, if the supervisor died.
        if start_ticks(record.pid) == record.start_ticks:
            with suppress(ProcessLookupError):
                os.kill(record.pid, number)
        ends = time.monotonic() + wait_s
        while time.monotonic() < ends:
            # The lock is free a moment before its holder has ended.
            if _clean_if_free(layout) and start_ticks(record.pid) != record.start_ticks:
                return True
            time.sleep(POLL_S)
    raise FleetError(f"process {record.pid} does not end", hint=f"see {layout.log('supervisor')}")


def _clean_if_free(layout: HomeLayout) -> bool:
    with try_lock(layout.lock) as mine:
        if mine:
            layout.clean_run()
        return mine
