"""Guard of a bed: ends what it left, its processes, the control groups of its nodes and its folder, when it is gone.

`python guard.py FOLDER DESCRIPTOR...` waits for the end of its input, whose other end the bed holds, then clears up:
so a bed that is killed leaves nothing either. It holds the bed's namespaces open meanwhile, so that their numbers
belong to nobody else while it looks for processes in them. `sweep` does the same for beds whose guard was killed too.
Imports the standard library alone: it is started beside every bed, as a script.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

PREFIX = "fs-bed-"
DAEMONS = "daemons"
"""File in a bed's folder: `pid.ticks` of each node daemon that ever ran, a line each. Their groups are named so."""
FORK_SERVER = b"fleetstart.runtime.launch.forkserver"
CGROUPS = Path("/sys/fs/cgroup")
GRACE_S = 6.0
"""From SIGTERM to SIGKILL: a node takes two seconds to end in order, and a little more without its Redis."""
KILLED_S = 5.0
POLL_S = 0.02


def folder_prefix() -> str:
    """Prefix of the folders of this process's beds; names the process, so that a dead one's folder is known."""
    return f"{PREFIX}{os.getpid()}.{ticks_of(os.getpid())}-"


def ticks_of(pid: int) -> int:
    """Start of the process: with its number it names a process for good. 0 if there is none, or only its corpse."""
    stat = _stat(pid)
    return stat[1] if stat else 0


def members(folder: Path, namespaces: Collection[int] = ()) -> list[int]:
    """Processes of the folder, those in one of these network namespaces (by inode), and all that descend from them.

    A part is told by its TMPDIR. Workers and fork servers have another one; their command line names the node's home.
    """
    tmp, home = f"TMPDIR={folder}/".encode(), f"{folder}/".encode()
    parents: dict[int, int] = {}
    found: set[int] = set()
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and int(entry) != os.getpid()):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            stat = _stat(pid)
            if stat is None:
                continue
            parents[pid] = stat[0]
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if (
                os.stat(f"/proc/{pid}/ns/net").st_ino in namespaces
                or any(entry.startswith(tmp) for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
                or (FORK_SERVER in words and any(word.startswith(home) for word in words))
            ):
                found.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def groups_of(folder: Path) -> list[Path]:
    """Control groups of all daemons that the bed ever had; innermost first."""
    try:
        epochs = tuple(f"fleetstart-{line}." for line in (folder / DAEMONS).read_text().split())
    except OSError:
        return []
    tops = [Path(at, name) for at, names, _ in os.walk(CGROUPS) for name in names if epochs and name.startswith(epochs)]
    return [Path(at) for top in tops for at, _, _ in os.walk(top, topdown=False)]


def clear(folder: Path, namespaces: Collection[int] = ()) -> None:
    """Everything of the bed, in whatever state it is."""
    for number, deadline_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, KILLED_S)):
        _signal(members(folder, namespaces), number)
        if _poll(lambda: not members(folder, namespaces), deadline_s):
            break
    # A group can be removed a moment after its last process has ended.
    _poll(lambda: not [group for group in groups_of(folder) if not _removed(group)], KILLED_S)
    shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Clears beds whose process is gone, and whose guard did not get to it."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = re.match(rf"{PREFIX}(\d+)\.(\d+)-", folder.name)
        if owner is not None and ticks_of(int(owner[1])) != int(owner[2]):
            clear(folder)


def _stat(pid: int) -> tuple[int, int] | None:
    """(parent, start time in ticks); None if there is no such process, or only its corpse."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        for each in (number, signal.SIGCONT):  # one that is stopped would not hear of it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, each)


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def _poll(done: Callable[[], bool], deadline_s: float) -> bool:
    ends_s = time.monotonic() + deadline_s
    while not done():
        if time.monotonic() > ends_s:
            return False
        time.sleep(POLL_S)
    return True


if __name__ == "__main__":
    sys.stdin.buffer.read()
    clear(Path(sys.argv[1]), {os.fstat(int(descriptor)).st_ino for descriptor in sys.argv[2:]})
