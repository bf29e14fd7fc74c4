"""Memory file systems of a container are bounded from outside, and those of the node are left alone.

The container is a stand-in: a process with mounts and a root of its own. The node is a thread with mounts of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fleetstart.prefetcher.processes.container_mounts import BYTES_PER_INODE, limit_tmpfs
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.isolation import linux

MOUNTS = 'mount -t tmpfs -o size=64m tmpfs "$0/inside"; exec "$@" "$0"'
ENTERS = "import os, sys; os.chroot(sys.argv[1]); os.chdir('/'); print(flush=True); sys.stdin.read()"


@pytest.fixture
def node() -> Iterator[ThreadPoolExecutor]:
    """A thread whose mounts no other has, and which are gone with it."""

    def part() -> None:
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)

    with ThreadPoolExecutor(1, initializer=part) as thread:
        yield thread


@contextlib.contextmanager
def container(root: Path) -> Iterator[int]:
    """A process below a root of its own, with a tmpfs at /inside, by its pid."""
    (root / "inside").mkdir(parents=True, exist_ok=True)
    command = ["unshare", "--mount", "sh", "-ec", MOUNTS, str(root), sys.executable, "-ISc", ENTERS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process.pid


def size_of(folder: str) -> tuple[int, int]:
    """Bytes and inodes of the file system that a folder is in."""
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize, found.f_files


def test_a_tmpfs_of_a_container_is_bounded_in_bytes_and_in_names(node: ThreadPoolExecutor, tmp_path: Path) -> None:
    def bounds() -> tuple[int, int]:
        with container(tmp_path) as pid:
            limit_tmpfs(pid, "/inside", 16 * MIB)
            return size_of(f"/proc/{pid}/root/inside")

    assert node.submit(bounds).result() == (16 * MIB, 16 * MIB // BYTES_PER_INODE)


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_a_link_of_an_image_leads_to_no_file_system_of_the_node(
    node: ThreadPoolExecutor, tmp_path: Path, folder: str
) -> None:
    """Followed from outside, it would end at what the node has at that path."""
    of_the_node, root = tmp_path / "node" / "shm", tmp_path / "root"
    of_the_node.mkdir(parents=True)
    root.mkdir()
    (root / "tmp").symlink_to(of_the_node)
    (root / "dev").symlink_to(of_the_node.parent)

    def refused() -> tuple[int | None, bool]:
        linux.mount("tmpfs", str(of_the_node), "tmpfs", 0, f"size={300 * MIB}")
        before = size_of(str(of_the_node))
        with container(root) as pid, pytest.raises(OSError, match=folder) as caught:
            limit_tmpfs(pid, folder, 16 * MIB)
        return caught.value.errno, size_of(str(of_the_node)) == before

    assert node.submit(refused).result() == (errno.ELOOP, True)
