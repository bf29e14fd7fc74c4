"""Epochs: an epoch identifies one run of a node daemon (pid, start time, token, namespace of its pid), so others can
check if it runs."""

from __future__ import annotations

import os
from pathlib import Path


def new_epoch(token: str) -> str:
    """Returns a new epoch of this process."""
    return f"{os.getpid()}.{_started_ticks(os.getpid())}.{token}.{namespace_of_pids()}"


def namespace_of_pids() -> str:
    """Number of the namespace in which pids are counted; empty where it cannot be seen."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""


def machine_id() -> str:
    """Id of the machine's boot and of the process namespace: pids can be compared where it is equal."""
    namespace = namespace_of_pids()
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}.{namespace}" if namespace else ""
    except OSError:
        return ""


def numbers_processes_as_we_do(epoch: str) -> bool:
    """True if the epoch's daemon counted pids in our namespace, so that it is known to be dead if it seems to be."""
    namespace = namespace_of_pids()
    return bool(namespace) and epoch.split(".")[3:] == [namespace]


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
