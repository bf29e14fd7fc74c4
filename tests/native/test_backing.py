"""Memory of every kind of pages as its readers see it: huge, shared, one copy, and read-only."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable

import pytest
from torch.utils.dlpack import from_dlpack

from fleetstart.native import Region, SlabPool, xxh3
from tests.native.neighbours import SLAB, Pages, Start, attached, hear, meminfo, rollup, say
from tests.servers import wait_until


def taken(pages: Pages, size_bytes: int) -> Region:
    slabs = -(-size_bytes // SLAB)
    return SlabPool("slabs", pages=pages, slab_bytes=SLAB, capacity=slabs).take(size_bytes)


def address_of(region: Region, offset: int = 0) -> int:
    return from_dlpack(region.dlpack(offset, [1], "U8")).data_ptr()


def test_readers_have_the_slabs_in_a_row_and_aligned_to_huge_pages(pages: Pages) -> None:
    owner = taken(pages, 3 * SLAB)
    for slab in range(3):
        owner.view(slab * SLAB, SLAB)[:] = bytes([slab + 1]) * SLAB
    reader = attached(owner)
    assert bytes(reader.view(SLAB - 1, SLAB + 2)) == b"\1" + b"\2" * SLAB + b"\3"
    assert address_of(reader) % SLAB == 0
    assert address_of(reader, 2 * SLAB) == address_of(reader) + 2 * SLAB
    reader.populate(0, 3 * SLAB)
    assert from_dlpack(reader.dlpack(SLAB // 2, [SLAB, 2], "U8")).float().mean() == 2


def test_a_view_of_the_owner_lies_in_one_slab_or_is_an_index_error(pages: Pages) -> None:
    owner = taken(pages, 2 * SLAB + 10)
    for offset, size in ((0, SLAB), (SLAB, SLAB), (2 * SLAB, 10), (SLAB, 0), (2 * SLAB + 10, 0), (SLAB - 1, 1)):
        assert owner.view(offset, size).nbytes == size
        owner.populate(offset, size)
    for offset, size in ((0, SLAB + 1), (SLAB - 1, 2), (SLAB + 1, SLAB), (0, 2 * SLAB + 10)):
        with pytest.raises(IndexError, match="more than one slab"):
            owner.view(offset, size)
        with pytest.raises(IndexError, match="more than one slab"):
            owner.populate(offset, size)
        with pytest.raises(IndexError, match="more than one slab"):
            owner.dlpack(offset, [size], "U8")
    for offset, size in ((2 * SLAB, 11), (2 * SLAB + 11, 0), (2**64 - 1, 1), (3 * SLAB, 1)):
        with pytest.raises(IndexError, match="outside a region"):
            owner.view(offset, size)


def test_readers_see_the_owner_s_later_writes_and_nobody_sees_theirs(pages: Pages) -> None:
    owner = taken(pages, 2 * SLAB)
    first, second = attached(owner), attached(owner)
    owner.view(SLAB, 4)[:] = b"late"
    assert bytes(first.view(SLAB, 4)) == b"late"
    from_dlpack(first.dlpack(SLAB, [4], "U8")).zero_()
    assert bytes(first.view(SLAB, 4)) == bytes(4)
    assert bytes(owner.view(SLAB, 4)) == bytes(second.view(SLAB, 4)) == b"late"


def test_who_has_a_slab_s_descriptor_can_neither_write_nor_resize_nor_reopen_it(pages: Pages) -> None:
    owner = taken(pages, SLAB)
    owner.view(0, 4)[:] = b"mine"
    (fd,) = owner.fds
    path = f"/proc/self/fd/{fd}"
    attempts: list[Callable[[int], object]] = [
        lambda to: os.pwrite(to, b"x", 0),
        lambda to: os.ftruncate(to, 0),
        lambda to: os.ftruncate(to, SLAB - mmap.PAGESIZE),
        lambda to: os.ftruncate(to, 2 * SLAB),
        lambda to: mmap.mmap(to, SLAB, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
        lambda to: os.posix_fallocate(to, 0, 2 * SLAB),
    ]
    try:
        again = os.open(path, os.O_RDWR)
    except OSError as error:
        assert error.strerror == "Read-only file system"  # noqa: PT017
        assert pages == "thp"
        again = os.dup(fd)
    for attempt in attempts:
        for descriptor in (fd, again):
            with pytest.raises(OSError, match=r"denied|permitted|Invalid|Bad file|Read-only"):
                attempt(descriptor)
    for size in (0, 2 * SLAB):
        with pytest.raises(OSError, match=r"permitted|Read-only"):
            os.truncate(path, size)
    os.close(again)
    assert os.fstat(fd).st_size == SLAB
    assert bytes(owner.view(0, 4)) == b"mine"


def test_nobody_finds_a_slab_by_a_path(pages: Pages) -> None:
    owner = taken(pages, SLAB)
    assert os.readlink(f"/proc/self/fd/{owner.fds[0]}").endswith(" (deleted)")
    assert os.fstat(owner.fds[0]).st_nlink == 0


def huge_kib(address: int) -> int:
    """KiB of huge pages in the mapping that begins there."""
    found = 0
    with open("/proc/self/smaps") as smaps:
        lines = iter(smaps)
        next(line for line in lines if line.startswith(f"{address:x}-"))
        for line in lines:
            if line.startswith("VmFlags:"):
                break
            if line.startswith(("ShmemPmdMapped:", "FilePmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:")):
                found += int(line.split()[1])
    return found


@pytest.mark.parametrize("pages", ["thp", "hugetlb"], indirect=True)
def test_huge_pages_are_huge_in_the_owner_and_in_readers(pages: Pages) -> None:
    owner = taken(pages, SLAB)
    owner.view(0, SLAB)[:] = b"x" * SLAB
    reader = attached(owner)
    assert xxh3(reader.view(0, SLAB)) == xxh3(b"x" * SLAB)
    assert huge_kib(address_of(owner)) == huge_kib(address_of(reader)) == SLAB // 1024


# ── processes ──────────────────────────────────────────────────────────────────────────────────────

READ_ALL = """
import sys
from fleetstart.native import Region, xxh3
region = Region.attach([int(fd) for fd in sys.argv[1:]], 2 * 1024 * 1024 * len(sys.argv[1:]))
print(xxh3(region.view(0, region.size_bytes)))
input()
"""


def test_the_second_reader_of_a_region_costs_no_memory(pages: Pages, start: Start) -> None:
    slabs = 32
    owner = taken(pages, slabs * SLAB)
    content = os.urandom(SLAB)
    for slab in range(slabs):
        owner.view(slab * SLAB, SLAB)[:] = content
    expected = str(xxh3(content * slabs))
    pids = [os.getpid()]

    def cost() -> int:
        if pages == "hugetlb":
            return -meminfo("HugePages_Free") * SLAB // 1024
        return sum(rollup("Pss_Shmem", pid) for pid in pids)

    alone = cost()
    for _ in range(2):
        child = start(READ_ALL, *owner.fds)
        assert hear(child) == expected
        pids.append(child.pid)
        assert abs(cost() - alone) < slabs * SLAB // 1024 // 10
        if pages != "hugetlb":
            assert rollup("Rss", child.pid) >= slabs * SLAB // 1024
    say(child, "enough")


FILL = """
from fleetstart.native import SlabPool
slab = 2 * 1024 * 1024
pool = SlabPool("killed", pages="thp", slab_bytes=slab, capacity=64)
region = pool.take(64 * slab)
for at in range(64):
    region.view(at * slab, slab)[:] = b"x" * slab
print("full")
input()
"""


def huge_mounts() -> list[str]:
    with open("/proc/self/mountinfo") as mounts:
        return [line for line in mounts if "huge=" in line]


@pytest.mark.parametrize("pages", ["thp"], indirect=True)
@pytest.mark.usefixtures("pages")
def test_a_pool_that_is_killed_leaves_nothing_behind(start: Start) -> None:
    """Huge pages on demand are the only kind with a file system."""
    mounts = huge_mounts()
    child = start(FILL)
    assert hear(child) == "full"
    assert huge_mounts() == mounts
    full_kib = meminfo("ShmemHugePages")
    assert full_kib >= 64 * SLAB // 1024
    child.send_signal(signal.SIGKILL)
    child.wait()
    wait_until(lambda: meminfo("ShmemHugePages") <= full_kib - 60 * SLAB // 1024)
    assert huge_mounts() == mounts
