"""Resource limits by control groups, version 1 or 2, whichever this machine lets us write.

Each worker has a group of its own below `fleetstart-<epoch>`, made before the worker is forked: attaching a process
takes milliseconds and must not fall into a cold start. The limits are written when the worker is assigned. Groups
outlive processes, so an epoch names its daemon's process, and the next daemon removes the groups of dead ones. Where
no group can be written, `workers.memory_watchdog` limits memory instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

log = logging.getLogger(__name__)

PIDS_MAX = 512
"""Limit of processes and threads: enough for torch on a large machine, far below a fork bomb."""
PREFIX = "fleetstart-"
SEARCH_DEPTH = 6
"""Levels below a mount that are searched for groups of dead daemons."""
V1_CONTROLLERS = ("memory", "pids", "cpu")
"""cpu without a quota: groups share the cores evenly, whatever their number of threads."""


class Cgroup(Protocol):
    """One worker's control group. Every call blocks for microseconds to milliseconds."""

    @property
    def procs(self) -> list[str]:
        """Files into which a process writes its id to join."""
        ...

    def limit(self, memory_bytes: int) -> None:
        """Sets the limits. OSError if the kernel refuses, for example a limit below what is used already."""
        ...

    def oom_kills(self) -> int: ...

    def remove(self) -> bool:
        """True once the group is removed; False while processes are left in it."""
        ...


class Cgroups(Protocol):
    """The control groups of one daemon."""

    name: str

    def create(self, worker: str) -> Cgroup: ...

    def close(self) -> None: ...


def new_epoch(token: str) -> str:
    """A new epoch, which names its process, so that others can check whether it is alive."""
    return f"{os.getpid()}.{_started_ticks(os.getpid())}.{token}"


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


# ── version 1 ──────────────────────────────────────────────────────────────────────────────────────


class CgroupV1:
    """A control group of version 1: one folder a controller."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        for folder in folders.values():
            folder.mkdir()

    @property
    def procs(self) -> list[str]:
        return [str(folder / "cgroup.procs") for folder in self._folders.values()]

    def limit(self, memory_bytes: int) -> None:
        memory = self._folders["memory"]
        (memory / "memory.limit_in_bytes").write_text(str(memory_bytes))
        swap = memory / "memory.memsw.limit_in_bytes"
        if swap.exists():
            swap.write_text(str(memory_bytes))
        if "pids" in self._folders:
            (self._folders["pids"] / "pids.max").write_text(str(PIDS_MAX))

    def oom_kills(self) -> int:
        return _field(self._folders["memory"] / "memory.oom_control", "oom_kill")

    def remove(self) -> bool:
        return all([_remove(folder) for folder in self._folders.values()])


class CgroupsV1:
    """Control groups of version 1."""

    name = "cgroup v1"

    def __init__(self, parents: dict[str, Path]) -> None:
        self._parents = parents

    def create(self, worker: str) -> CgroupV1:
        return CgroupV1({controller: parent / worker for controller, parent in self._parents.items()})

    def close(self) -> None:
        for parent in self._parents.values():
            remove_tree(parent)


# ── version 2 ──────────────────────────────────────────────────────────────────────────────────────


class CgroupV2:
    """A control group of version 2."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    @property
    def procs(self) -> list[str]:
        return [str(self._folder / "cgroup.procs")]

    def limit(self, memory_bytes: int) -> None:
        (self._folder / "memory.max").write_text(str(memory_bytes))
        swap = self._folder / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")
        # All processes of a worker die together: a part of them is useless.
        (self._folder / "memory.oom.group").write_text("1")
        (self._folder / "pids.max").write_text(str(PIDS_MAX))

    def oom_kills(self) -> int:
        return _field(self._folder / "memory.events", "oom_kill")

    def remove(self) -> bool:
        return _remove(self._folder)


class CgroupsV2:
    """Control groups of version 2."""

    name = "cgroup v2"

    def __init__(self, parent: Path) -> None:
        self._parent = parent

    def create(self, worker: str) -> CgroupV2:
        return CgroupV2(self._parent / worker)

    def close(self) -> None:
        remove_tree(self._parent)


# ── detection ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """One mounted hierarchy, as this process sees it."""

    controllers: frozenset[str]
    """Empty for version 2."""
    mount: Path
    own: Path
    """This process' group, below the mount (or the mount itself, where it cannot be seen)."""


def read_hierarchies(mountinfo: str, own_cgroup: str) -> list[Hierarchy]:
    """Parses the texts of /proc/self/mountinfo and /proc/self/cgroup."""
    own_paths: dict[frozenset[str], str] = {}
    for line in own_cgroup.splitlines():
        _, names, path = line.split(":", 2)
        own_paths[frozenset(name for name in names.split(",") if name)] = path
    found: list[Hierarchy] = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split()[:3]
        if kind not in ("cgroup", "cgroup2"):
            continue
        root, mount = fields[3], Path(fields[4])
        controllers = next(
            (known for known in own_paths if known and kind == "cgroup" and known <= set(options.split(","))),
            frozenset[str](),
        )
        if kind == "cgroup" and not controllers:
            continue
        path = own_paths.get(controllers, "/")
        inside = os.path.relpath(path, root) if path.startswith(root) else "."
        found.append(Hierarchy(controllers=controllers, mount=mount, own=mount / inside))
    return found


def open_cgroups(epoch: str, hierarchies: list[Hierarchy]) -> Cgroups | None:
    """Control groups of this daemon in the first writable place, or None. Removes those of dead daemons."""
    for hierarchy in hierarchies:
        for stale in _stale_groups(hierarchy.mount):
            log.info("removing the group of a dead daemon", extra={"group": str(stale)})
            remove_tree(stale)
    return _open_v1(epoch, hierarchies) or _open_v2(epoch, hierarchies)


def _open_v1(epoch: str, hierarchies: list[Hierarchy]) -> CgroupsV1 | None:
    parents: dict[str, Path] = {}
    for controller in V1_CONTROLLERS:
        hierarchy = next((entry for entry in hierarchies if controller in entry.controllers), None)
        made = hierarchy and _make_parent(epoch, hierarchy)
        if made:
            parents[controller] = made
    if "memory" not in parents:
        for parent in parents.values():
            remove_tree(parent)
        return None
    return CgroupsV1(parents)


def _open_v2(epoch: str, hierarchies: list[Hierarchy]) -> CgroupsV2 | None:
    """Needs memory and pids. Tries our own group first, then the root, which systemd prepares for its children."""
    wanted = {"memory", "pids"}
    for hierarchy in (entry for entry in hierarchies if not entry.controllers):
        for place in dict.fromkeys((hierarchy.own, hierarchy.mount)):
            if not wanted <= _words(place / "cgroup.controllers"):
                continue
            parent = place / f"{PREFIX}{epoch}"
            try:
                _enable(place, wanted)
                parent.mkdir()
                _enable(parent, wanted)
                return CgroupsV2(parent)
            except OSError as error:
                log.info("cannot use this control group", extra={"group": str(place), "error": str(error)})
                remove_tree(parent)
    return None


def _enable(folder: Path, controllers: set[str]) -> None:
    control = folder / "cgroup.subtree_control"
    if missing := controllers - _words(control):
        control.write_text(" ".join(f"+{name}" for name in sorted(missing)))


def _make_parent(epoch: str, hierarchy: Hierarchy) -> Path | None:
    for place in dict.fromkeys((hierarchy.own, hierarchy.mount)):
        parent = place / f"{PREFIX}{epoch}"
        with contextlib.suppress(OSError):
            parent.mkdir()
            return parent
    return None


def _stale_groups(mount: Path) -> Iterator[Path]:
    for folder, names, _ in os.walk(mount):
        depth = len(Path(folder).relative_to(mount).parts)
        for name in list(names):
            if name.startswith(PREFIX):
                names.remove(name)
                if not epoch_is_alive(name.removeprefix(PREFIX)):
                    yield Path(folder, name)
        if depth >= SEARCH_DEPTH:
            names.clear()


def remove_tree(folder: Path, timeout_s: float = 1.0) -> bool:
    """Removes a group and those below it, waiting briefly for processes that are exiting."""
    deadline = time.monotonic() + timeout_s
    while folder.exists():
        for below, _, _ in os.walk(folder, topdown=False):
            _remove(Path(below))
        if folder.exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    return True


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _words(path: Path) -> set[str]:
    try:
        return set(path.read_text().split())
    except OSError:
        return set()


def _field(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
