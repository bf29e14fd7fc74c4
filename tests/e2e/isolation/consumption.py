"""What a worker used of the machine is in its rows and in `fs usage`, and no more than the node lets it, with each
isolation."""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

from fleetstart.runtime.contract.billing.ledger import PhaseRow
from tests.e2e.systems import System
from tests.servers import wait_until

BURNT_MS, TAKEN_BYTES = 600, 48 << 20
HASHED = b"x" * (1 << 20)
HANDLER = """
import hashlib
from fleetstart.runtime import Scale, function

@function(isolation="ISOLATION", memory="96MiB", scale=Scale(max=1, keep_alive_s=600))
def burns(rounds: int, size: int):
    kept = b"x" * size
    for _ in range(rounds):
        hashlib.sha256(kept[:1 << 20]).digest()
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


def rounds_of(cpu_ms: float) -> int:
    """Number of times that HASHED is hashed in so much processor time, which is counted outside: gVisor's own count
    goes on while the machine runs something else."""
    began_s, rounds = time.process_time(), 0
    while (taken_s := time.process_time() - began_s) < 0.1:
        hashlib.sha256(HASHED).digest()
        rounds += 1
    return round(rounds * cpu_ms / 1000 / taken_s)


def assert_consumption_is_metered(system: System, isolation: str, *, own_bytes: int = 0) -> None:
    """`own_bytes`: what the isolation itself may have, beside the function's limit."""
    name = f"burns-{isolation}"
    system.deploy(HANDLER.replace("ISOLATION", isolation), name=name)
    assert system.ok(name, {"rounds": rounds_of(BURNT_MS), "size": TAKEN_BYTES}) == TAKEN_BYTES
    system.fs("rm", name, "--yes")

    def metered() -> tuple[list[PhaseRow], dict[str, Any]] | None:
        """Rows and bill when its last rows have come to both. The trial of its deploy has rows of its own, and the
        start of a sandbox alone may take as much: the call's row is waited for. A core that another program shares, or
        has left, is up to twice as quick as it was, and the node may hear of a call when it has begun."""
        rows, line = system.phases(name), line_of(system, name)
        burnt_ms = sum(row.cpu_ms or 0 for row in rows)
        executed_ms = sum(row.cpu_ms or 0 for row in rows if row.phase == "execute")
        peak_bytes = max((row.memory_peak_bytes or 0 for row in rows), default=0)
        same = (line["cpu_ms"], line["memory_peak_bytes"]) == (burnt_ms, peak_bytes)
        return (rows, line) if same and executed_ms >= BURNT_MS / 3 else None

    rows, line = wait_until(metered, 30, what="its processor time in the bill") or ([], {})
    assert sum(row.cpu_ms or 0 for row in rows) < 100 * BURNT_MS
    assert all(row.cpu_ms is not None for row in rows if row.phase in ("load", "execute", "idle"))
    assert TAKEN_BYTES < line["memory_peak_bytes"] <= (96 << 20) + own_bytes
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
