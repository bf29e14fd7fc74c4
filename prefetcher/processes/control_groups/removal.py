"""Removal of control groups, and of whatever processes are left in them.

A worker's processes end with it where it has a namespace of processes. Without one, and where a worker outlived its
daemon, the group is all by which they are found. Functions write nothing here, so they cannot leave it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path


def remove_groups(folders: Sequence[Path]) -> bool:
    """Removes groups that have the same processes, one a hierarchy. If there are some left, they are killed; False
    until they are gone."""
    if all([_remove(folder) for folder in folders]):
        return True
    for folder in folders:
        kill_processes(folder)
    return all([_remove(folder) for folder in folders])


def remove_tree(folder: Path, timeout_s: float = 1.0) -> bool:
    """Removes a group and those below it, kills what is in them, and waits briefly for its end. False: it has not
    ended in time."""
    deadline = time.monotonic() + timeout_s
    while not remove_empty(folder):
        kill_tree(folder)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def remove_empty(folder: Path) -> bool:
    """Removes a group and those below it if there are no processes in them; True if it is gone."""
    for below, _, _ in os.walk(folder, topdown=False):
        _remove(Path(below))
    return not folder.exists()


def kill_tree(folder: Path) -> None:
    """Kills all processes in a group and in those below it."""
    for below, _, _ in os.walk(folder):
        kill_processes(Path(below))


def kill_processes(folder: Path) -> None:
    """Kills all processes in a group; they are in it until they have ended. Where it has the controller of processes,
    nothing can be forked in it any more: else one that forks and ends could escape each look at the list."""
    _write(folder / "pids.max", b"0")
    if _write(folder / "cgroup.kill", b"1"):  # version 2, Linux 5.14 and later
        return
    for pid in _processes(folder):
        with contextlib.suppress(OSError):  # it has ended, or is of another namespace of processes
            pidfd = os.pidfd_open(pid)
            try:
                if pid in _processes(folder):  # the number may have been another process' by then
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)


def _processes(folder: Path) -> list[int]:
    try:
        return [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _write(path: Path, text: bytes) -> bool:
    """Writes a file of the kernel's; False if there is none, or it takes nothing."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text)
        finally:
            os.close(fd)
    except OSError:
        return False
    return True
