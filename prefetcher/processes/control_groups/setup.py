"""Finds where this machine lets us write control groups, makes the daemon's own, and removes those of dead daemons."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..epoch import epoch_is_alive, numbers_processes_as_we_do
from .groups import PREFIX, Cgroups, CgroupsV1, CgroupsV2
from .removal import kill_tree, remove_empty, remove_tree

log = logging.getLogger(__name__)

SEARCH_DEPTH = 6
"""Levels below a mount that are searched for groups of dead daemons."""

V1_CONTROLLERS = ("memory", "pids", "cpu", "cpuacct")
"""cpu without a quota, unless the node has a limit: groups share the cores evenly, whatever their number of threads.
cpuacct counts their time; it usually is in one hierarchy with cpu."""
WORKERS_WEIGHT = 25
"""Share of all workers together, where any other group has 100: controller, node and Redis come first when processors
or disks are short. They need little, and calls wait for them; workers have all that is left."""
V1_SHARES = 1024 * WORKERS_WEIGHT // 100


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


def open_cgroups(epoch: str, hierarchies: list[Hierarchy], cpus: float = 0.0) -> Cgroups | None:
    """Control groups of this daemon in the first writable place, or None. Removes those of dead daemons, and ends what
    is left in them: nobody counts its memory any more. `cpus`: the processors that one worker may use at most, 0 for
    all."""
    _remove_stale(hierarchies)
    return make_cgroups(epoch, hierarchies, cpus)


def make_cgroups(epoch: str, hierarchies: list[Hierarchy], cpus: float = 0.0) -> Cgroups | None:
    """`open_cgroups`, without a look at those of dead daemons."""
    return _open_v1(epoch, hierarchies, cpus) or _open_v2(epoch, hierarchies, cpus)


def _remove_stale(hierarchies: list[Hierarchy]) -> None:
    stale = [
        group
        for hierarchy in hierarchies
        for group in _stale_groups(hierarchy.mount)
        if not remove_empty(group) and not hierarchy.own.is_relative_to(group)
    ]
    left = [group for group in stale if numbers_processes_as_we_do(group.name.removeprefix(PREFIX))]
    for group in left:  # all before the first is awaited: that of the controller of processes ends their forks
        kill_tree(group)
    for group in left:
        log.info("ending what a dead daemon's workers left", extra={"group": str(group)})
        if not remove_tree(group):
            log.warning("processes of a dead daemon's workers do not end", extra={"group": str(group)})


def _open_v1(epoch: str, hierarchies: list[Hierarchy], cpus: float) -> CgroupsV1 | None:
    parents: dict[str, Path] = {}
    for controller in V1_CONTROLLERS:
        hierarchy = next((entry for entry in hierarchies if controller in entry.controllers), None)
        if hierarchy is None:
            continue
        shared = next((parents[other] for other in hierarchy.controllers if other in parents), None)
        if made := shared or _make_parent(epoch, hierarchy):
            parents[controller] = made
    if "memory" not in parents:
        for parent in parents.values():
            remove_tree(parent)
        return None
    if "cpu" in parents:
        _write_weight(parents["cpu"] / "cpu.shares", V1_SHARES)
    return CgroupsV1(parents, cpus)


def _open_v2(epoch: str, hierarchies: list[Hierarchy], cpus: float) -> CgroupsV2 | None:
    """Needs memory and pids, takes cpu and io where they are. Tries our own group first, then the root, which systemd
    prepares for its children."""
    needed = {"memory", "pids"}
    for hierarchy in (entry for entry in hierarchies if not entry.controllers):
        for place in dict.fromkeys((hierarchy.own, hierarchy.mount)):
            available = _words(place / "cgroup.controllers")
            if not needed <= available:
                continue
            wanted = needed | (available & {"cpu", "io"})
            parent = place / f"{PREFIX}{epoch}"
            try:
                _enable(place, wanted)
                parent.mkdir()
                _enable(parent, wanted)
                for controller in wanted & {"cpu", "io"}:
                    _write_weight(parent / f"{controller}.weight", WORKERS_WEIGHT)
                return CgroupsV2(parent, cpus, limits_cpus="cpu" in wanted)
            except OSError as error:
                log.info("cannot use this control group", extra={"group": str(place), "error": str(error)})
                remove_tree(parent)
    return None


def _write_weight(path: Path, weight: int) -> None:
    """Sets the share of a group, where the kernel has shares of that kind (io: with some schedulers of disks alone)."""
    try:
        if path.exists():
            path.write_text(str(weight))
    except OSError as error:
        log.info("workers keep the default share", extra={"file": str(path), "error": str(error)})


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


def _words(path: Path) -> set[str]:
    try:
        return set(path.read_text().split())
    except OSError:
        return set()
