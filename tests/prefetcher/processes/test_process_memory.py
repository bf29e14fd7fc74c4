"""Memory that a process and its children alone have, of real processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fleetstart.prefetcher.processes.process_memory import private_bytes
from fleetstart.runtime.contract.sizes import MIB
from tests.servers import spawn

SIZE_BYTES = 64 * MIB
UP = "\nprint('up', flush=True)\ninput()"
"""The end of a program that has what it takes, and keeps it until it is told."""
TOUCH = "\nfor at in range(0, len(held), 4096):\n    held[at] = 1"


@contextlib.contextmanager
def program(code: str, *arguments: str, descriptors: tuple[int, ...] = ()) -> Iterator[int]:
    """A process that runs the code, which prints a line once it is as it stays. Yields its id."""
    command = [sys.executable, "-c", code, *arguments]
    process = spawn(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=descriptors)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process.pid
    finally:
        process.communicate(b"\n")
        assert private_bytes(process.pid) == 0, "it is gone"


def test_memory_of_children_counts() -> None:
    code = "import subprocess, sys; held = b'x' * (40 << 20); subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = "held = b'x' * (50 << 20)" + UP

    with program(code, child) as pid:
        assert 90 * MIB < private_bytes(pid) < 140 * MIB


SHARED = {
    "anonymous": "held = mmap.mmap(-1, size)",
    "memfd": "fd = os.memfd_create('mine'); os.ftruncate(fd, size); held = mmap.mmap(fd, size)",
    "posix": """
from multiprocessing.shared_memory import SharedMemory
block = SharedMemory(create=True, size=size)
block.unlink()
held = block.buf
""",
    "system v": """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
found = libc.shmget(0, ctypes.c_size_t(size), 0o1600)
held = (ctypes.c_ubyte * size).from_address(libc.shmat(found, None, 0))
libc.shmctl(found, 0, None)
""",
}
CHILDREN = """
ends, kept = os.pipe()
for _ in range(2):
    told, tells = os.pipe()
    if not os.fork():
        os.close(kept)
        os.write(tells, bytes([held[at] for at in range(0, len(held), 4096)][-1:]))
        os.read(ends, 1)
        os._exit(0)
    os.read(told, 1)
"""
"""Two children that have read all that is held, and end with the process."""


@pytest.mark.parametrize("kind", SHARED)
def test_shared_memory_that_it_writes_counts_once_with_all_its_children(kind: str) -> None:
    code = f"import mmap, os\nsize = {SIZE_BYTES}\n" + SHARED[kind] + TOUCH + CHILDREN + UP

    with program(code) as pid:
        assert SIZE_BYTES < private_bytes(pid) < SIZE_BYTES + SIZE_BYTES // 2


@pytest.mark.parametrize(("written", "least", "most"), [(SIZE_BYTES, 0.5, 1.5), (4096, 0.0, 0.5)])
def test_of_a_process_with_tens_of_thousands_of_mappings_what_is_in_memory_counts(
    written: int, least: float, most: float
) -> None:
    """Pages are mappings of their own where every second one is read-only."""
    code = (
        f"import ctypes, mmap\nsize, libc = {SIZE_BYTES}, ctypes.CDLL(None)\nheld = mmap.mmap(-1, size)\n"
        f"for at in range(0, {written}, 4096):\n    held[at] = 1\n"
        "begin = ctypes.addressof(ctypes.c_char.from_buffer(held))\n"
        "for at in range(4096, size, 8192):\n    assert libc.mprotect(ctypes.c_void_p(begin + at), 4096, 1) == 0" + UP
    )
    with program(code) as pid:
        assert least * SIZE_BYTES <= private_bytes(pid) < most * SIZE_BYTES


@pytest.mark.parametrize("flags", ["MAP_SHARED", "MAP_PRIVATE"])
def test_memory_that_it_was_given_to_read_does_not_count(flags: str) -> None:
    code = (
        f"import mmap, sys; held = mmap.mmap(int(sys.argv[1]), 0, prot=mmap.PROT_READ, flags=mmap.{flags}); "
        "n = sum(held[at] for at in range(0, len(held), 4096))" + UP
    )
    fd = os.memfd_create("weights")
    try:
        os.write(fd, b"w" * SIZE_BYTES)
        with program(code, str(fd), descriptors=(fd,)) as pid:
            assert private_bytes(pid) < SIZE_BYTES // 2
    finally:
        os.close(fd)
