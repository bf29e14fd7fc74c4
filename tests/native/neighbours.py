"""Neighbours of native memory: other processes, hostile descriptors, and the kernel's account of our mappings."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

from fleetstart.native import ControlBlock, Region, SlabPool

F_SEAL_FUTURE_WRITE = 0x10
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | F_SEAL_FUTURE_WRITE
PATIENCE_S = 30.0
"""Far more than anything here takes: only what never happens takes as long."""

SLAB = 2 * 1024 * 1024
"""The least that huge pages come in."""

Pages = Literal["small", "thp", "hugetlb"]
Shared = TypeVar("Shared", ControlBlock, Region)
Child = subprocess.Popen[str]
Start = Callable[..., Child]


def spawn(code: str, *descriptors: int) -> Child:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def say(child: Child, line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()


def hear(child: Child) -> str:
    """The child's next line; empty if it is gone."""
    assert child.stdout is not None
    return child.stdout.readline().rstrip("\n")


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def memory_with(content: bytes, seals: int = SEALS) -> int:
    """A memfd with that content, as a stranger could have made it."""
    descriptor = os.memfd_create("stranger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, content)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def meminfo(field: str) -> int:
    """A value of the whole machine's /proc/meminfo; memory in KiB."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def rollup(field: str, pid: int | str = "self") -> int:
    """A sum over all of a process's memory in KiB, without hugetlb."""
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def hugetlb_kib() -> int:
    """Memory in reserved huge pages of this process's open files. The machine's numbers are other tests', too."""
    files = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(f"/proc/self/fd/{name}")
            files.add((found.st_dev, found.st_ino, found.st_blocks if found.st_blksize == SLAB else 0))
    return sum(blocks for _, _, blocks in files) * 512 // 1024


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings_of(name: str) -> int:
    """Number of this process's mappings of the memfd of that name."""
    with open("/proc/self/maps") as maps:
        return sum(f"memfd:{name} " in line for line in maps)


@contextmanager
def threads_never_switched() -> Iterator[None]:
    """The interpreter takes the GIL from nobody: another thread runs only if this one gives it up."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(PATIENCE_S * 100)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def lets_others_run(call: Callable[[], object], patience_s: float = PATIENCE_S / 3) -> bool:
    """True if another Python thread makes progress during the call, which is repeated until it did."""
    go, ran = threading.Event(), threading.Event()

    def other() -> None:
        go.wait()
        ran.set()

    thread = threading.Thread(target=other)
    thread.start()
    until(lambda: thread.is_alive())
    with threads_never_switched():
        go.set()
        deadline = time.monotonic() + patience_s
        while not ran.is_set() and time.monotonic() < deadline:
            call()
        seen = ran.is_set()
    thread.join(PATIENCE_S)
    return seen


def owned(size_bytes: int, name: str = "owned") -> Region:
    """New memory in one piece, of a pool of its own that ends with it."""
    slab_bytes = 1 << max(size_bytes - 1, mmap.PAGESIZE - 1).bit_length()
    return SlabPool(name, pages="small", slab_bytes=slab_bytes, capacity=1).take(size_bytes)


def attached(memory: Shared) -> Shared:
    """The region as another process has it."""
    if isinstance(memory, Region):
        return Region.attach([os.dup(fd) for fd in memory.fds], memory.size_bytes)
    return ControlBlock.attach(os.dup(memory.fd))
