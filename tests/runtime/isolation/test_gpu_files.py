"""Device files of GPUs: which of them a worker sees, and that the others are gone from it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.node.devices import DeviceId
from fleetstart.runtime.contract.node.messages import DeviceBinding
from fleetstart.runtime.isolation.gpu_files import SHARED, hidden, present
from tests.runtime.workers import ForkServerProcess, Functions, served

ALL = [f"/dev/{name}" for name in ("nvidia0", "nvidia1", "nvidia10", *SHARED, "dri", "kfd")]
DEV = """
mount -t tmpfs none /dev && mkdir /dev/pts /dev/shm && mount -t tmpfs none /dev/shm
for name in null full nvidia0 nvidia1 nvidiactl nvidia-uvm; do mknod -m 666 /dev/$name c 1 3; done
mknod -m 666 /dev/zero c 1 5; mknod -m 666 /dev/random c 1 8; mknod -m 666 /dev/urandom c 1 9
mknod -m 666 /dev/tty c 5 0; ln -s pts/ptmx /dev/ptmx
exec "$@"
"""
"""A /dev with two GPUs, in a mount namespace of its own: they are the null device by other names."""
SEEN = """
import os, stat

def f():
    names = [name for name in os.listdir("/dev") if name.startswith("nvidia")]
    return sorted(name for name in names if stat.S_ISCHR(os.stat(f"/dev/{name}").st_mode))
"""


def bound(*files: str) -> DeviceBinding:
    return DeviceBinding(devices=tuple(DeviceId(f"cuda:{at}") for at in range(len(files))), files=files)


@pytest.mark.parametrize(
    ("binding", "gone"),
    [
        (None, []),
        (bound(), ALL),
        (bound("/dev/nvidia1"), ["/dev/nvidia0", "/dev/nvidia10", "/dev/dri", "/dev/kfd"]),
        (bound("/dev/nvidia0", "/dev/nvidia10"), ["/dev/nvidia1", "/dev/dri", "/dev/kfd"]),
        (bound("/dev/nvidia0", ""), []),
    ],
    ids=["no devices listed", "no GPU", "one", "two", "one that is not known"],
)
def test_a_worker_sees_its_own_gpus_and_what_all_share(binding: DeviceBinding | None, gone: list[str]) -> None:
    assert hidden(ALL, binding) == gone


@given(st.sets(st.integers(0, 31), min_size=1), st.data())
def test_no_file_of_another_gpu_is_left(minors: set[int], data: st.DataObject) -> None:
    own = data.draw(st.sets(st.sampled_from(sorted(minors)), min_size=1))
    paths = [f"/dev/nvidia{minor}" for minor in minors] + [f"/dev/{name}" for name in SHARED]
    binding = bound(*(f"/dev/nvidia{minor}" for minor in own))
    seen = set(paths) - set(hidden(paths, binding))
    assert seen == {f"/dev/nvidia{minor}" for minor in own} | {f"/dev/{name}" for name in SHARED}


def test_files_of_gpus_are_told_from_others(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidiactl", "null", "kfd", "sda", "dri"):
        (tmp_path / name).touch()
    assert present(str(tmp_path)) == [str(tmp_path / name) for name in ("dri", "kfd", "nvidia0", "nvidiactl")]


@pytest.fixture
def with_gpus(tmp_path: Path) -> Iterator[Functions]:
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("making device files needs root")
    server = ForkServerProcess(through=("unshare", "-m", "--propagation", "private", "sh", "-ec", DEV, "sh"))
    try:
        if "mnt" not in server.warm.isolation:
            pytest.skip(f"no mount namespaces here: {server.refused}")
        yield from served(server, tmp_path)
    finally:
        server.close()


def test_the_files_of_other_gpus_are_gone_from_a_worker(with_gpus: Functions) -> None:
    def seen(binding: DeviceBinding | None) -> Any:
        worker = with_gpus.ready(SEEN, binding=binding)
        return worker.post().json()

    everything = ["nvidia-uvm", "nvidia0", "nvidia1", "nvidiactl"]
    assert seen(None) == everything
    assert seen(bound("/dev/nvidia1")) == ["nvidia-uvm", "nvidia1", "nvidiactl"]
    assert seen(bound()) == []
