"""Processes of a system under test, as /proc shows them: what each is, its sockets, and control groups of daemons."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
KINDS = {
    "fleetstart.controller.cli.local.supervisor": "supervisor",
    "fleetstart.controller": "controller",
    "fleetstart.prefetcher": "node",
    "fleetstart.runtime.launch.forkserver": "forkserver",
}
"""Module that a Python process of ours runs → what it is. A worker shows its fork server's command line."""


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """One process for good: the number alone may be given to another."""

    pid: int
    ticks: int
    kind: str = field(compare=False)
    parent: int = field(compare=False)
    profile: str = field(compare=False, default="")

    @property
    def alive(self) -> bool:
        stat = stat_of(self.pid)
        return stat is not None and stat[1] == self.ticks


def processes_of(home: str) -> list[Process]:
    """Processes that name this FS_HOME in their environment or command line."""
    return _generations(list(_naming(home)))


def _generations(processes: list[Process]) -> list[Process]:
    """All that were forked by a fork server show its command line: its children are workers, theirs are `child`."""
    forked = {process.pid: process.parent for process in processes if process.kind == "forkserver"}

    def kind(process: Process) -> str:
        if process.pid not in forked:
            return process.kind
        if process.parent not in forked:
            return "child" if _is_ending(process.parent) else process.kind
        return "child" if forked[process.parent] in forked else "worker"

    return [dataclasses.replace(process, kind=kind(process)) for process in processes]


def _is_ending(pid: int) -> bool:
    """A worker that was killed and is first in a namespace has no memory any more, and waits there for its children."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _naming(home: str) -> Iterator[Process]:
    wanted = f"FS_HOME={home}".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            arguments = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            environ = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted not in environ and not any(home.encode() in argument for argument in arguments):
            continue
        stat = stat_of(int(entry))
        if stat is not None:
            words = [argument.decode(errors="replace") for argument in arguments]
            profile = words[words.index("--profile") + 1] if "--profile" in words else ""
            yield Process(int(entry), stat[1], _kind(words), stat[0], profile)


def _kind(arguments: list[str]) -> str:
    # The server writes its title over its command line.
    if Path(arguments[0].partition(" ")[0]).name in ("valkey-server", "redis-server"):
        return "redis"
    return next((KINDS[word] for word in arguments if word in KINDS), " ".join(arguments))


def stat_of(pid: int) -> tuple[int, int] | None:
    """(parent, start time in ticks); None if there is no such process, or only its corpse."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))


def listener_inode(port: int) -> str:
    """Inode of the socket that listens on the port, in this network namespace: the daemon opened it."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and int(words[1].partition(":")[2], 16) == port:
            return words[9]
    raise AssertionError(f"nobody listens on port {port}")


def socket_inodes(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{entry}")
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def control_groups(pid: int) -> list[Path]:
    """Groups of the daemon that had this number, wherever this machine lets daemons make them."""
    # os.walk, unlike rglob, does not mind that others' groups vanish meanwhile.
    prefix = f"fleetstart-{pid}."
    return [Path(at, name) for at, names, _ in os.walk(CGROUPS) for name in names if name.startswith(prefix)]
