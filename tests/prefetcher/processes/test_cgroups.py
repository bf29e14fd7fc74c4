"""Control groups: version 1 on this machine where it can be written, version 2 on a tree of the same shape."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetstart.prefetcher.processes.control_groups.groups import PREFIX, CgroupsV1, CgroupsV2
from fleetstart.prefetcher.processes.control_groups.setup import (
    WORKERS_WEIGHT,
    Hierarchy,
    _write_weight,
    open_cgroups,
    read_hierarchies,
)
from fleetstart.prefetcher.processes.epoch import epoch_is_alive, new_epoch
from tests.servers import spawn, wait_until

MIB = 1 << 20


def test_an_epoch_knows_whether_its_daemon_lives() -> None:
    mine = new_epoch("token")
    process = subprocess.Popen(
        [sys.executable, "-c", "from fleetstart.prefetcher.processes.epoch import new_epoch; print(new_epoch('x'))"],
        stdout=subprocess.PIPE,
    )
    theirs = process.communicate()[0].decode().strip()

    assert epoch_is_alive(mine)
    assert not epoch_is_alive(theirs)
    pid, ticks, *rest = mine.split(".")
    assert not epoch_is_alive(".".join([pid, str(int(ticks) + 1), *rest]))
    assert not epoch_is_alive("nonsense")


def test_a_daemon_that_nobody_waited_for_is_dead() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "from fleetstart.prefetcher.processes.epoch import new_epoch; print(new_epoch('x'))"],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    theirs = process.stdout.read().decode().strip()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert Path(f"/proc/{process.pid}/stat").exists()
    assert not epoch_is_alive(theirs)
    process.communicate()


def test_hierarchies_are_read_as_the_kernel_writes_them() -> None:
    mountinfo = (
        "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
        "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "37 31 0:34 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw shared:1 - cgroup2 cgroup2 rw\n"
    )
    own = "9:name=systemd:/\n4:memory:/docker/abc/inner\n2:cpu,cpuacct:/user\n0::/slice\n"

    found = read_hierarchies(mountinfo, own)

    assert found == [
        Hierarchy(
            controllers=frozenset({"cpu", "cpuacct"}),
            mount=Path("/sys/fs/cgroup/cpu,cpuacct"),
            own=Path("/sys/fs/cgroup/cpu,cpuacct/user"),
        ),
        Hierarchy(
            controllers=frozenset({"memory"}),
            mount=Path("/sys/fs/cgroup/memory"),
            own=Path("/sys/fs/cgroup/memory/inner"),
        ),
        Hierarchy(
            controllers=frozenset({"name=systemd"}),
            mount=Path("/sys/fs/cgroup/systemd"),
            own=Path("/sys/fs/cgroup/systemd"),
        ),
        Hierarchy(
            controllers=frozenset(), mount=Path("/sys/fs/cgroup/unified"), own=Path("/sys/fs/cgroup/unified/slice")
        ),
    ]


# ── version 2, on a tree ───────────────────────────────────────────────────────────────────────────


def fake_v2(root: Path, controllers: str = "cpu memory pids") -> Hierarchy:
    own = root / "own"
    own.mkdir(parents=True)
    for folder in (root, own):
        (folder / "cgroup.controllers").write_text(controllers)
        (folder / "cgroup.subtree_control").write_text("")
    return Hierarchy(controllers=frozenset(), mount=root, own=own)


def test_v2_makes_a_group_per_worker_with_limits(tmp_path: Path) -> None:
    hierarchy = fake_v2(tmp_path)

    groups = open_cgroups("1.2.x", [hierarchy])
    assert isinstance(groups, CgroupsV2)
    group = groups.create("w-1")
    group.limit(256 * MIB)

    folder = hierarchy.own / f"{PREFIX}1.2.x" / "w-1"
    assert group.procs == [str(folder / "cgroup.procs")]
    assert (folder / "memory.max").read_text() == str(256 * MIB)
    assert (folder / "pids.max").read_text() == "512"
    assert (folder / "memory.oom.group").read_text() == "1"
    assert "memory" in (hierarchy.own / "cgroup.subtree_control").read_text()


def test_v2_shares_processors_and_disks_where_it_can(tmp_path: Path) -> None:
    hierarchy = fake_v2(tmp_path, controllers="cpu io memory pids")
    parent = hierarchy.own / f"{PREFIX}1.2.x"

    assert open_cgroups("1.2.x", [hierarchy]) is not None

    for folder in (hierarchy.own, parent):
        assert (folder / "cgroup.subtree_control").read_text() == "+cpu +io +memory +pids"
    assert not (parent / "cpu.weight").exists(), "this tree has no files of a kernel"
    assert _enabled(tmp_path / "two", "memory pids") == "+memory +pids"


def test_a_weight_is_written_where_the_kernel_has_its_file(tmp_path: Path) -> None:
    path = tmp_path / "cpu.weight"
    _write_weight(path, WORKERS_WEIGHT)
    assert not path.exists()
    path.write_text("100")
    _write_weight(path, WORKERS_WEIGHT)
    assert path.read_text() == "25"


def _enabled(root: Path, controllers: str) -> str:
    hierarchy = fake_v2(root, controllers)
    assert open_cgroups("1.2.x", [hierarchy]) is not None
    return (hierarchy.own / "cgroup.subtree_control").read_text()


def test_v2_reads_kills(tmp_path: Path) -> None:
    groups = open_cgroups("1.2.x", [fake_v2(tmp_path)])
    assert groups is not None
    group = groups.create("w-1")
    folder = tmp_path / "own" / f"{PREFIX}1.2.x" / "w-1"

    assert group.oom_kills() == 0
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 2\noom_kill 1\n")
    assert group.oom_kills() == 1


def test_v2_reads_what_was_used_and_what_is_not_counted_is_none(tmp_path: Path) -> None:
    groups = open_cgroups("1.2.x", [fake_v2(tmp_path)])
    assert groups is not None
    group = groups.create("w-1")
    folder = tmp_path / "own" / f"{PREFIX}1.2.x" / "w-1"

    assert (group.cpu_ns(), group.memory_peak_bytes()) == (None, None)
    (folder / "cpu.stat").write_text("usage_usec 1234567\nuser_usec 1000000\nsystem_usec 234567\n")
    (folder / "memory.peak").write_text("70000000\n")
    assert (group.cpu_ns(), group.memory_peak_bytes()) == (1_234_567_000, 70_000_000)


def test_controllers_of_one_hierarchy_of_version_1_share_a_folder(tmp_path: Path) -> None:
    both, memory = frozenset({"cpu", "cpuacct"}), frozenset({"memory"})
    found = [
        Hierarchy(controllers=one, mount=tmp_path / ",".join(sorted(one)), own=tmp_path / "x") for one in (both, memory)
    ]
    for hierarchy in found:
        hierarchy.mount.mkdir()
    groups = open_cgroups("1.2.x", found)
    assert isinstance(groups, CgroupsV1)

    group = groups.create("w-1")

    folders = sorted(Path(path).parent for path in group.procs)
    assert folders == [tmp_path / name / f"{PREFIX}1.2.x" / "w-1" for name in ("cpu,cpuacct", "memory")]
    assert group.remove()
    assert not any(folder.exists() for folder in folders)


@pytest.mark.parametrize("controllers", ["cpu memory pids", "memory pids"])
def test_v2_limits_processors_where_it_can(tmp_path: Path, controllers: str) -> None:
    groups = open_cgroups("1.2.x", [fake_v2(tmp_path, controllers)], 1.5)
    assert groups is not None
    group = groups.create("w-1")
    group.limit(MIB)

    limit = tmp_path / "own" / f"{PREFIX}1.2.x" / "w-1" / "cpu.max"
    assert groups.limits_cpus == limit.exists() == ("cpu" in controllers)
    assert not limit.exists() or limit.read_text() == "150000 100000"


def test_v2_without_the_memory_controller_is_not_used(tmp_path: Path) -> None:
    assert open_cgroups("1.2.x", [fake_v2(tmp_path, controllers="hugetlb")]) is None


def test_groups_of_dead_daemons_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    hierarchy = fake_v2(tmp_path)
    dead, living = hierarchy.own / f"{PREFIX}999999999.1.dead", tmp_path / "slice" / f"{PREFIX}{new_epoch('alive')}"
    (dead / "w-1").mkdir(parents=True)
    (living / "w-2").mkdir(parents=True)

    open_cgroups("1.2.x", [hierarchy])

    assert not dead.exists()
    assert (living / "w-2").exists()


# ── version 1, for real ────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def v1() -> Iterator[CgroupsV1]:
    hierarchies = read_hierarchies(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    groups = open_cgroups(new_epoch("test"), hierarchies)
    if not isinstance(groups, CgroupsV1):
        pytest.skip("this machine lets us write no cgroup v1")
    try:
        yield groups
    finally:
        groups.close()


SPIN = "import sys; [open(path, 'w').write('0') for path in sys.argv[1:]]; print('in', flush=True)\nwhile True: pass"


def test_v1_gives_the_platform_the_processors_before_the_workers(v1: CgroupsV1, tmp_path: Path) -> None:
    """Threads of a function compete with one of the platform's for one processor, and leave it the larger part."""
    group = v1.create("w-1")
    if not any("/cpu" in path for path in group.procs):
        pytest.skip("this machine has no cpu controller")
    processor = min(os.sched_getaffinity(0))
    pinned = ["taskset", "-c", str(processor), sys.executable, "-c", SPIN]
    greedy = [spawn([*pinned, *group.procs], stdout=subprocess.PIPE) for _ in range(4)]
    platform = spawn(pinned, stdout=subprocess.PIPE)
    try:
        for process in (*greedy, platform):
            assert process.stdout is not None
            process.stdout.readline()
        before = [_ticks(process.pid) for process in (*greedy, platform)]
        wait_until(lambda: _ticks(platform.pid) - before[-1] > 30, 60, what="processor time of the platform")
        *theirs, ours = (
            _ticks(process.pid) - begun for process, begun in zip((*greedy, platform), before, strict=True)
        )
        assert ours > sum(theirs)  # without shares it has a fifth; ticks of 10 ms and other processes blur the rest
    finally:
        for process in (*greedy, platform):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        wait_until(group.remove)


def _ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


HOG = """
import sys
for path in sys.argv[1:]:
    open(path, "w").write("0")
input()
held = bytearray(64 << 20)
input()
"""


def test_v1_ends_what_takes_more_than_its_limit_and_says_so(v1: CgroupsV1) -> None:
    group = v1.create("w-1")
    hog = spawn([sys.executable, "-c", HOG, *group.procs], stdin=subprocess.PIPE)
    assert hog.stdin is not None
    wait_until(lambda: all(Path(path).read_text().split() == [str(hog.pid)] for path in group.procs))
    group.limit(32 * MIB)

    hog.stdin.write(b"\n")
    hog.stdin.flush()

    assert hog.wait(20) == -9
    hog.stdin.close()
    assert group.oom_kills() == 1
    assert (group.cpu_ns() or 0) > 0, "also of processes that have ended"
    assert 16 * MIB < (group.memory_peak_bytes() or 0) <= 32 * MIB
    wait_until(group.remove)
    assert not any(Path(path).exists() for path in group.procs)


def test_v1_removes_everything_at_the_end(v1: CgroupsV1) -> None:
    folders = [Path(path).parent for name in ("w-1", "w-2") for path in v1.create(name).procs]

    v1.close()

    assert not any(folder.exists() or folder.parent.exists() for folder in folders)


def test_a_limit_below_what_is_used_is_refused(v1: CgroupsV1) -> None:
    group = v1.create("w-1")
    hog = spawn([sys.executable, "-c", HOG, *group.procs], stdin=subprocess.PIPE)
    assert hog.stdin is not None
    hog.stdin.write(b"\n")
    hog.stdin.flush()
    usage = next(path for procs in group.procs if (path := Path(procs).with_name("memory.usage_in_bytes")).exists())
    wait_until(lambda: int(usage.read_text()) > 64 * MIB)

    with pytest.raises(OSError, match="busy"):
        group.limit(16 * MIB)

    hog.kill()
    hog.wait()
    hog.stdin.close()
    wait_until(group.remove)
