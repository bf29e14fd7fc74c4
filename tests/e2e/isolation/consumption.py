"""What a worker used of the machine is in its rows and in `fs usage`, and no more than the node lets it, with each
isolation."""

from __future__ import annotations

import json
from typing import Any

from fleetstart.runtime.contract.billing.ledger import PhaseRow
from tests.e2e.systems import System
from tests.servers import wait_until

BURNT_MS, TAKEN_BYTES = 300, 48 << 20
HANDLER = """
import time
from fleetstart.runtime import Scale, function

@function(isolation="ISOLATION", memory="96MiB", scale=Scale(max=1, keep_alive_s=600))
def burns(cpu_s: float, size: int):
    kept = b"x" * size
    until = time.process_time() + cpu_s
    while time.process_time() < until:
        pass
    return len(kept)
"""
CROWD = 3
CROWDS = """
import os, time
from fleetstart.runtime import Scale, function

@function(isolation="ISOLATION", memory="96MiB", scale=Scale(max=1, keep_alive_s=600))
def crowds(seconds: float, processes: int):
    until = time.monotonic() + seconds
    children = [os.fork() for _ in range(processes) if os.getpid() == parent]
    while time.monotonic() < until:
        pass
    if os.getpid() != parent:
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)

parent = os.getpid()
"""


def line_of(system: System, name: str) -> dict[str, Any]:
    (line,) = json.loads(system.fs("usage", name, "--by", "function", "--json").out)["lines"]
    return dict(line)


def assert_consumption_is_metered(system: System, isolation: str, *, own_bytes: int = 0) -> None:
    """`own_bytes`: what the isolation itself may have, beside the function's limit."""
    name = f"burns-{isolation}"
    system.deploy(HANDLER.replace("ISOLATION", isolation), name=name)
    assert system.ok(name, {"cpu_s": BURNT_MS / 1000, "size": TAKEN_BYTES}) == TAKEN_BYTES
    system.fs("rm", name, "--yes")

    def metered() -> bool:
        """True when its last rows have come. The trial of its deploy has rows of its own, and the start of a sandbox
        alone may take as much: the call's row is waited for."""
        rows = system.phases(name)
        burnt_ms = sum(row.cpu_ms or 0 for row in rows)
        executed = any(row.cpu_ms for row in rows if row.phase == "execute")
        return executed and burnt_ms >= BURNT_MS * 0.9 and line_of(system, name)["cpu_ms"] == burnt_ms

    wait_until(metered, 30, what="its processor time in the bill")
    rows = system.phases(name)
    assert sum(row.cpu_ms or 0 for row in rows) < 100 * BURNT_MS
    assert all(row.cpu_ms is not None for row in rows if row.phase in ("load", "execute", "idle"))
    peak_bytes = max(row.memory_peak_bytes or 0 for row in rows)
    assert TAKEN_BYTES < peak_bytes <= (96 << 20) + own_bytes
    line = line_of(system, name)
    assert line["memory_peak_bytes"] == peak_bytes
    assert (line["received_bytes"], line["sent_bytes"], line["device_peak_bytes"]) == (None, None, None)
    shown = system.fs("usage", name, "--by", "function").out
    assert "CPU s" in shown
    assert "MEMORY PEAK" in shown
    assert "OUT" not in shown.split()


def assert_processors_are_limited(system: System, isolation: str, cpus: float) -> None:
    """Several processes of one worker together get no more than a node's FS_CPU_LIMIT."""
    name = f"crowds-{isolation}"
    system.deploy(CROWDS.replace("ISOLATION", isolation), name=name)
    system.ok(name, {"seconds": 1.5, "processes": CROWD})
    system.fs("rm", name, "--yes")

    def rows_of_call() -> list[PhaseRow]:
        """Rows of its time at work, when the call's are among them. A sandbox has a clock of its own, and the node
        hears of a call's begin later where all cores are taken: what is metered may be less than the handler took."""
        rows = system.phases(name, "execute")
        return rows if sum(row.duration_ms for row in rows) >= 1000 else []

    rows = wait_until(rows_of_call, 30, what="its busy time")
    used_ms, busy_ms = sum(row.cpu_ms or 0 for row in rows), sum(row.duration_ms for row in rows)
    assert 0 < used_ms <= busy_ms * cpus * 1.15 + 100, "a period more, at most"
