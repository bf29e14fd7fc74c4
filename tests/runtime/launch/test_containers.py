"""What containers are made of, decided from plain values; and what is said where there is no engine."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.channel import Channel, pair
from fleetstart.runtime.contract.node.messages import (
    CheckImage,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    ForkServerMessage,
    ImageChecked,
    LauncherReady,
    LauncherUnavailable,
)
from fleetstart.runtime.isolation.root import Mount, Root
from fleetstart.runtime.launch.base_image import OWN_DIR, base_image, shown_mounts
from fleetstart.runtime.launch.carried_python import CARRIED, Interpreter, plan_carried, this_interpreter
from fleetstart.runtime.launch.carried_start import image_paths
from fleetstart.runtime.launch.container_engine import ContainerPlan, host_settings
from fleetstart.runtime.launch.launcher import LaunchedWorker, serve
from tests.runtime.workers import receive

PLAN = Root(
    (Mount("/usr", "/usr"), Mount("/dev/null", "/dev/null"), Mount("/sys/devices/system/cpu", "x"), Mount("/opt/a/b")),
    (("/bin", "usr/bin"), ("/etc/passwd", "/run/passwd"), ("/tmp/link", "/usr"), ("/dev/fd", "/proc/self/fd")),
)


def container(*, network: bool = False, **rest: Any) -> ContainerPlan:
    return ContainerPlan(
        name="fs-1", image="i", command=("python",), environment={}, user=2000, shown=shown_mounts(PLAN), node="/n",
        launcher="/n/1", network=network, **rest,
    )  # fmt: skip


def test_the_image_has_folders_links_and_one_file_and_the_places_of_all_mounts() -> None:
    tag, data = base_image(PLAN)
    assert base_image(PLAN)[0] == tag, "its name is that of its content"
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = {"/" + member.name: member for member in tar}
    assert {"/tmp", "/opt/a", OWN_DIR, "/layer"} <= set(members)
    links = {path: member.linkname for path, member in members.items() if member.issym()}
    assert links == {
        "/bin": "usr/bin", "/etc/passwd": f"{OWN_DIR}/passwd", "/etc/group": f"{OWN_DIR}/group", "/var/tmp": "/tmp",
    }  # fmt: skip
    assert [path for path, member in members.items() if member.isfile()] == ["/etc/nsswitch.conf"]


def test_a_container_has_no_rights_and_no_network() -> None:
    settings = host_settings(container())
    assert settings["cap_drop"] == ["ALL"]
    assert settings["read_only"]
    assert "no-new-privileges" in settings["security_opt"]
    assert settings["network_mode"] == "none"
    assert settings["binds"] == ["/usr:/usr:ro"], "devices and /sys are the engine's own"
    assert "nr_inodes=" in settings["tmpfs"]["/tmp"]
    assert settings["tmpfs"]["/opt/a/b"].startswith("ro,")
    assert settings["pids_limit"] > 0
    assert "nr_inodes=" not in host_settings(container(), podman=True)["tmpfs"]["/tmp"]
    assert host_settings(container(network=True))["network_mode"] == "host"


def test_a_containers_first_process_is_ours_also_where_the_engine_starts_an_init_process_in_others() -> None:
    assert host_settings(container())["init"] is False


def test_volumes_of_an_image_are_memory_and_no_folders_on_the_disk() -> None:
    settings = host_settings(container(volumes=("/data", "/tmp")))
    assert settings["tmpfs"]["/data"] == settings["tmpfs"]["/tmp"]
    assert "size=" in settings["tmpfs"]["/data"]


def test_gpus_are_requested_by_their_names_in_the_container_device_interface() -> None:
    """The request alone: no test runs it on a GPU."""
    assert host_settings(container())["device_requests"] == []
    (request,) = host_settings(container(gpus=("GPU-1f", "MIG-2a")))["device_requests"]
    assert dict(request) == {
        "Driver": "cdi", "Count": 0, "Capabilities": [], "Options": {},
        "DeviceIDs": ["nvidia.com/gpu=GPU-1f", "nvidia.com/gpu=MIG-2a"],
    }  # fmt: skip


INTERPRETER = Interpreter(
    program="/root/py/bin/python3.11", version="python3.11", library="/root/py/lib/python3.11", loader="/lib/ld.so.2",
    libraries=("/lib/x86",), packages=("/srv/venv/lib/python3.11/site-packages",), own=(),
)  # fmt: skip


def test_a_python_is_carried_below_one_folder_and_runs_under_its_own_loader() -> None:
    carried = plan_carried(INTERPRETER)
    assert all(mount.path.startswith(f"{CARRIED}/") for mount in carried.mounts if mount.source)
    assert {mount.source for mount in carried.mounts if mount.source} == {
        "/root/py/bin/python3.11", "/root/py/lib/python3.11", "/lib/ld.so.2", "/lib/x86",
        "/srv/venv/lib/python3.11/site-packages",
    }  # fmt: skip
    assert carried.command == (
        f"{CARRIED}/loader", "--library-path", f"{CARRIED}/lib/0", f"{CARRIED}/python/bin/python3.11", "-I", "-S", "-B",
        f"{CARRIED}/packages/0/fleetstart/runtime/launch/carried_start.py", f"{CARRIED}/packages/0",
    )  # fmt: skip


def test_an_editable_installation_is_carried_from_its_checkout() -> None:
    own = (("runtime", "/srv/x/runtime"), ("native/_core.so", "/srv/_core.so"))
    carried = plan_carried(dataclasses.replace(INTERPRETER, own=own))
    assert Mount(f"{CARRIED}/own/fleetstart/native/_core.so", "/srv/_core.so") in carried.mounts
    assert carried.command[-3:] == (
        f"{CARRIED}/own/fleetstart/runtime/launch/carried_start.py", f"{CARRIED}/own", f"{CARRIED}/packages/0",
    )  # fmt: skip


def test_this_interpreter_has_all_parts_on_this_machine() -> None:
    python = this_interpreter("")
    for path in (python.program, python.library, python.loader, *python.libraries, *python.packages):
        assert os.path.exists(path), path
    assert all(os.path.exists(path) for _, path in python.own)


def test_packages_of_an_image_are_those_that_its_variables_and_its_python_name() -> None:
    found = image_paths({"PYTHONPATH": "/opt/lib:relative", "VIRTUAL_ENV": "/venv"}, "python3.99")
    assert found == [
        "/opt/lib", "/venv/lib/python3.99/site-packages", "/usr/local/lib/python3.99/site-packages",
        "/usr/lib/python3.99/site-packages",
    ]  # fmt: skip


def test_a_node_without_its_engine_says_so_to_whoever_asks(tmp_path: Path) -> None:
    ours, its = pair()
    engine = f"unix://{tmp_path}/none.sock"
    argv = [sys.executable, "-m", "fleetstart.runtime.launch.container", "--fd", str(its.fileno()), "--engine", engine]
    argv += ["--state", str(tmp_path / "state")]
    process = subprocess.Popen(argv, pass_fds=(its.fileno(),), env={"PATH": os.defpath}, stderr=subprocess.DEVNULL)
    its.close()
    channel = Channel[ForkServerMessage](ours, ForkServerMessage)
    try:
        refused = receive(channel)
        assert isinstance(refused, LauncherUnavailable)
        assert engine in refused.reason
        with open(os.devnull, "rb") as nothing:
            channel.send(Fork(worker=WorkerId("w-1"), profile="python"), (nothing.fileno(), nothing.fileno()))
        said = receive(channel)
        assert isinstance(said, ForkFailed)
        assert engine in said.reason
        channel.send(CheckImage(WorkerId("w-1")))
        assert receive(channel) == ImageChecked(WorkerId("w-1"), current=False)
    finally:
        channel.close()
        assert process.wait(20) == 0
    assert not (tmp_path / "state").exists()


class EndsAtOnce:
    """A launcher whose workers have ended and been reaped by another process before it is told of them."""

    def __init__(self, workers: int) -> None:
        """Starts them: not in the launcher's thread, where `--quick` could not leave the test out."""
        self._ended = [self._end() for _ in range(workers)]

    def _end(self) -> tuple[int, int]:
        child = subprocess.Popen(["true"])
        pidfd = os.pidfd_open(child.pid)
        child.wait()
        return child.pid, pidfd

    def describe(self, *, network: bool) -> str:
        return "container"

    def launch(self, fork: Fork, control_fd: int, log_fd: int) -> LaunchedWorker:
        return LaunchedWorker(fork.worker, *self._ended.pop())

    def reap(self, child: LaunchedWorker) -> int:
        return 7


def test_a_worker_that_ends_as_it_is_launched_ends_no_launcher() -> None:
    launcher = EndsAtOnce(2)
    ours, its = pair()
    thread = threading.Thread(target=serve, args=(its, launcher, LauncherReady("container", "container")))
    thread.start()
    channel = Channel[ForkServerMessage](ours, ForkServerMessage)
    try:
        assert isinstance(receive(channel), LauncherReady)
        for name in ("w-1", "w-2"):
            with open(os.devnull, "rb") as nothing:
                channel.send(Fork(worker=WorkerId(name), profile="python"), (nothing.fileno(), nothing.fileno()))
            forked = receive(channel)
            assert isinstance(forked, Forked)
            assert forked.pid > 0
            assert receive(channel) == Exited(WorkerId(name), 7)
    finally:
        channel.close()
        thread.join(20)
        its.close()


@pytest.mark.parametrize("module", ["container", "containers", "container_worker"])
def test_workers_and_launchers_of_others_do_not_load_the_client_of_engines(module: str) -> None:
    code = f"import sys, fleetstart.runtime.launch.{module}; sys.exit('docker' in sys.modules)"
    loads = subprocess.run([sys.executable, "-c", code]).returncode
    assert loads == (module == "containers")
