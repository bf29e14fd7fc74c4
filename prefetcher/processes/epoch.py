"""Epochs: an epoch identifies one run of a node daemon (pid, start time, token), so others can check if it runs."""

from __future__ import annotations

import os
from pathlib import Path


def new_epoch(token: str) -> str:
    """Returns a new epoch of this process."""
    return f"{os.getpid()}.{_started_ticks(os.getpid())}.{token}"


def machine_id() -> str:
    """Id of the machine's boot and of the process namespace: pids can be compared where it is equal."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def epoch_is_alive(epoch: str) -> bool:
    """True if the daemon of this epoch still runs."""
    pid, _, rest = epoch.partition(".")
    ticks = rest.partition(".")[0]
    return pid.isdecimal() and _started_ticks(int(pid)) == ticks != ""


def _started_ticks(pid: int) -> str:
    """Start time of a process in clock ticks: with the pid it identifies a process for good. Empty if none runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # Where process 1 does not reap orphans, a zombie may stay for ever: it counts as dead.
    return "" if fields[0] in "ZX" else fields[19]
