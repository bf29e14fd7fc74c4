"""Resource limits by control groups, version 1 or 2. `setup` finds the one that this machine lets us write.

Each worker has a group of its own below `fleetstart-<epoch>`, made before the worker is forked: attaching a process
takes milliseconds and must not fall into a cold start. The limits are written when the worker is assigned. Groups
outlive processes, so an epoch names its daemon's process, and the next daemon removes the groups of dead ones, with
what is left in them. Where no group can be written, `workers.memory_watchdog` limits memory instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from .removal import remove_groups, remove_tree

PIDS_MAX = 512
"""Limit of processes and threads: enough for torch on a large machine, far below a fork bomb."""
PREFIX = "fleetstart-"
CPU_PERIOD_US = 100_000
"""Period over which a limit of processors holds, the kernel's own: a worker that spent its part waits for the next."""


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

    def cpu_ns(self) -> int | None:
        """Processor time of all processes that were ever in it; None where the kernel does not count it."""
        ...

    def memory_peak_bytes(self) -> int | None:
        """The most memory that it has had; None where the kernel does not keep it."""
        ...

    def remove(self) -> bool:
        """Kills the processes that are left in it; True once they and the group are gone, False until then."""
        ...


class Cgroups(Protocol):
    """The control groups of one daemon."""

    name: str
    limits_cpus: bool
    """True if the kernel can hold a worker to a number of processors here."""

    def create(self, worker: str) -> Cgroup: ...

    def close(self) -> None: ...


# ── version 1 ──────────────────────────────────────────────────────────────────────────────────────


class CgroupV1:
    """A control group of version 1: one folder a hierarchy, which has one controller or several."""

    def __init__(self, folders: dict[str, Path], cpus: float) -> None:
        """`folders`: by controller. `cpus`: processors at most, 0 for all."""
        self._folders = folders
        self._cpus = cpus
        self._own = list(dict.fromkeys(folders.values()))
        for folder in self._own:
            folder.mkdir()

    @property
    def procs(self) -> list[str]:
        return [str(folder / "cgroup.procs") for folder in self._own]

    def limit(self, memory_bytes: int) -> None:
        memory = self._folders["memory"]
        (memory / "memory.limit_in_bytes").write_text(str(memory_bytes))
        swap = memory / "memory.memsw.limit_in_bytes"
        if swap.exists():
            swap.write_text(str(memory_bytes))
        if "pids" in self._folders:
            (self._folders["pids"] / "pids.max").write_text(str(PIDS_MAX))
        if self._cpus and "cpu" in self._folders:
            (self._folders["cpu"] / "cpu.cfs_period_us").write_text(str(CPU_PERIOD_US))
            (self._folders["cpu"] / "cpu.cfs_quota_us").write_text(str(round(self._cpus * CPU_PERIOD_US)))

    def oom_kills(self) -> int:
        return _field(self._folders["memory"] / "memory.oom_control", "oom_kill") or 0

    def cpu_ns(self) -> int | None:
        return _number(self._folders["cpuacct"] / "cpuacct.usage") if "cpuacct" in self._folders else None

    def memory_peak_bytes(self) -> int | None:
        return _number(self._folders["memory"] / "memory.max_usage_in_bytes")

    def remove(self) -> bool:
        return remove_groups(self._own)


class CgroupsV1:
    """Control groups of version 1."""

    name = "cgroup v1"

    def __init__(self, parents: dict[str, Path], cpus: float = 0.0) -> None:
        self._parents = parents
        self._cpus = cpus
        self.limits_cpus = "cpu" in parents

    def create(self, worker: str) -> CgroupV1:
        return CgroupV1({controller: parent / worker for controller, parent in self._parents.items()}, self._cpus)

    def close(self) -> None:
        for parent in self._parents.values():
            remove_tree(parent)


# ── version 2 ──────────────────────────────────────────────────────────────────────────────────────


class CgroupV2:
    """A control group of version 2."""

    def __init__(self, folder: Path, cpus: float) -> None:
        """`cpus`: processors at most, 0 for all."""
        self._folder = folder
        self._cpus = cpus
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
        if self._cpus:
            (self._folder / "cpu.max").write_text(f"{round(self._cpus * CPU_PERIOD_US)} {CPU_PERIOD_US}")

    def oom_kills(self) -> int:
        return _field(self._folder / "memory.events", "oom_kill") or 0

    def cpu_ns(self) -> int | None:
        used_us = _field(self._folder / "cpu.stat", "usage_usec")
        return None if used_us is None else used_us * 1000

    def memory_peak_bytes(self) -> int | None:
        return _number(self._folder / "memory.peak")  # Linux 5.19 and later

    def remove(self) -> bool:
        return remove_groups([self._folder])


class CgroupsV2:
    """Control groups of version 2."""

    name = "cgroup v2"

    def __init__(self, parent: Path, cpus: float = 0.0, *, limits_cpus: bool = True) -> None:
        self._parent = parent
        self._cpus = cpus if limits_cpus else 0.0
        self.limits_cpus = limits_cpus

    def create(self, worker: str) -> CgroupV2:
        return CgroupV2(self._parent / worker, self._cpus)

    def close(self) -> None:
        remove_tree(self._parent)


def _field(path: Path, name: str) -> int | None:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
