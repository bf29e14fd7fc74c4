"""Control groups that are removed with the processes in them: in whatever hierarchies this machine lets us write."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fleetstart.prefetcher.processes.control_groups.groups import PREFIX, Cgroups
from fleetstart.prefetcher.processes.control_groups.removal import remove_groups, remove_tree
from fleetstart.prefetcher.processes.control_groups.setup import (
    SEARCH_DEPTH,
    V1_CONTROLLERS,
    Hierarchy,
    open_cgroups,
    read_hierarchies,
)
from fleetstart.prefetcher.processes.epoch import namespace_of_pids, new_epoch
from tests.servers import spawn, wait_until

NAME = f"{PREFIX}999999999.1.removal"
"""Of a daemon that does not run, without the namespace of its numbers."""
JOINS = """
import os, sys
for path in sys.argv[1:]:
    with open(path, "w") as procs:
        procs.write("0")
print("in", flush=True)
"""
SLEEPS = f"{JOINS}sys.stdin.read()"
FLEES = f"""{JOINS}
while True:  # a new process every time: whoever looks at the list is late
    if os.fork():
        os._exit(0)
"""


@contextlib.contextmanager
def inside(procs: list[str], code: str = SLEEPS) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the groups of these files."""
    process = spawn([sys.executable, "-c", code, *procs], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"in\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def hierarchies() -> Iterator[list[Hierarchy]]:
    """Hierarchies that a daemon may use and this machine lets us write, so far down that the daemons of other tests,
    which remove what dead ones left, do not look."""
    own = read_hierarchies(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    tops: list[Path] = []
    found: list[Hierarchy] = []
    for hierarchy in own:
        if hierarchy.controllers and hierarchy.controllers.isdisjoint(V1_CONTROLLERS):
            continue
        top = hierarchy.own / f"removal-{os.getpid()}"
        deep = top.joinpath(*["deeper"] * (SEARCH_DEPTH + 1))
        with contextlib.suppress(OSError):
            deep.mkdir(parents=True)
            tops.append(top)
            found.append(replace(hierarchy, mount=deep, own=deep))
    if not found:
        pytest.skip("this machine lets us write no cgroup v1, nor another")
    yield found
    for top in tops:
        remove_tree(top)


@pytest.fixture
def folders(hierarchies: list[Hierarchy]) -> list[Path]:
    """A group in each."""
    made = [hierarchy.own / "group" for hierarchy in hierarchies]
    for folder in made:
        folder.mkdir()
    return made


@pytest.fixture
def groups(hierarchies: list[Hierarchy]) -> Cgroups:
    """Groups of a daemon that does not run any more."""
    found = open_cgroups(f"{NAME.removeprefix(PREFIX)}.{namespace_of_pids()}", hierarchies)
    if found is None:
        pytest.skip("this machine lets us write no cgroup v1, nor version 2")
    return found


def test_a_group_is_removed_with_what_runs_in_it(folders: list[Path]) -> None:
    for folder in folders:
        with inside([str(folder / "cgroup.procs")]) as process:
            wait_until(functools.partial(remove_groups, [folder]), what=f"the end of {folder}")
            assert process.wait(20) == -9
        assert not folder.exists()


def test_a_tree_that_is_not_of_the_kernel_is_only_removed(tmp_path: Path) -> None:
    (tmp_path / "tree" / "w-1").mkdir(parents=True)
    assert remove_tree(tmp_path / "tree")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    assert not remove_groups([tmp_path / "kept"])
    assert not remove_tree(tmp_path / "kept", timeout_s=0.05)
    assert os.listdir(tmp_path / "kept") == ["file"]


def test_what_forks_without_end_ends_with_its_worker_s_group(groups: Cgroups) -> None:
    group = groups.create("w-1")
    with inside(group.procs, FLEES):
        wait_until(group.remove, what="the end of all that it forked")
    assert not any(Path(path).exists() for path in group.procs)


def test_the_next_daemon_ends_what_a_dead_one_s_workers_left(hierarchies: list[Hierarchy], groups: Cgroups) -> None:
    one, other = groups.create("w-1"), groups.create("w-2")
    with inside(one.procs) as process, inside(other.procs, FLEES):
        began_s = time.monotonic()
        following = open_cgroups(new_epoch("following"), hierarchies)
        took_s = time.monotonic() - began_s
        assert process.wait(20) == -9
    assert following is not None
    following.close()
    assert not any(Path(path).exists() for path in (*one.procs, *other.procs))
    assert took_s < 10


def test_the_workers_of_a_daemon_in_another_process_namespace_are_left_alone(hierarchies: list[Hierarchy]) -> None:
    """The other daemon may run, which cannot be told from here: its numbers of processes are others."""
    foreign = [hierarchy.own / f"{NAME}.1" for hierarchy in hierarchies]
    empty = [hierarchy.own / f"{NAME}.2" for hierarchy in hierarchies]
    for folder in (*foreign, *empty):
        folder.mkdir()
    with inside([str(folder / "cgroup.procs") for folder in foreign]) as process:
        following = open_cgroups(new_epoch("following"), hierarchies)
        assert process.poll() is None
    assert all(folder.exists() for folder in foreign)
    assert not any(folder.exists() for folder in empty)
    if following is not None:
        following.close()


def test_a_daemon_does_not_end_itself(folders: list[Path]) -> None:
    """Started by what a dead one left, it is in a group of it."""
    own = f"{NAME}.{namespace_of_pids()}/w-1"
    below = [Hierarchy(controllers=frozenset(), mount=folder, own=folder / own) for folder in folders]
    for hierarchy in below:
        hierarchy.own.mkdir(parents=True)
    with inside([str(hierarchy.own / "cgroup.procs") for hierarchy in below]) as process:
        open_cgroups(new_epoch("inside"), below)
        assert process.poll() is None
