"""Limits of a slab pool: what it refuses, and what it gives back when something fails halfway."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fleetstart.native import SlabPool
from tests.native.neighbours import SLAB, Pages, Start, hear, open_descriptors
from tests.native.pools import CAPACITY, counts, is_zero, pool_of, soil


@pytest.mark.parametrize("size", [CAPACITY * SLAB + 1, 2**63, 2**64 - SLAB, 2**64 - 1])
def test_more_than_the_capacity_is_no_memory_and_changes_nothing(pages: Pages, size: int) -> None:
    pool = pool_of(pages)
    before = counts(pool)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        pool.take(size)
    with pytest.raises(TypeError):
        pool.take(-1)
    assert counts(pool) == before


@pytest.mark.parametrize(
    ("pages", "slab_bytes", "capacity"),
    [("small", 2048, 1), ("small", 12288, 1), ("small", 0, 1), ("small", 4096, 0), ("thp", 4096, 1), ("thp", SLAB, 0),
     ("hugetlb", SLAB // 2, 1), ("hugetlb", 3 * SLAB, 1), ("large", SLAB, 1)],
)  # fmt: skip
def test_pools_that_cannot_be(pages: Pages, slab_bytes: int, capacity: int) -> None:
    with pytest.raises(ValueError, match=r"slabs of|pages are"):
        SlabPool("wrong", pages=pages, slab_bytes=slab_bytes, capacity=capacity)


def test_slabs_that_no_machine_has_are_an_os_error_when_taken() -> None:
    pool = SlabPool("vast", pages="small", slab_bytes=2**62, capacity=2**64 - 1)
    for size in (1, 2**63 + 1):
        with pytest.raises(OSError, match=r"addresses|memory|vast"):
            pool.take(size)
    assert counts(pool) == (0, 0, 0)


def test_a_name_is_no_way_out_of_the_pool_s_own_files(pages: Pages, tmp_path: Path) -> None:
    if pages == "thp":
        for name in (str(tmp_path / "absolute"), "no/folder"):
            with pytest.raises(FileNotFoundError):
                pool_of(pages, name=name)
        pool_of(pages, name="../" * 20 + str(tmp_path)[1:].replace("/", "-"))
    assert list(tmp_path.iterdir()) == []


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """No more than that many can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 10, hard))
    fillers = []
    try:
        with suppress(OSError):
            while True:
                fillers.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(count):
            os.close(fillers.pop())
        yield
    finally:
        for filler in fillers:
            os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_a_take_that_fails_halfway_gives_back_what_it_had(pages: Pages, left: int) -> None:
    pool = pool_of(pages, capacity=8)
    soil(pool.take(2 * SLAB))
    before = open_descriptors()
    assert counts(pool) == (0, 0, 2)
    with descriptors_left(left), pytest.raises(OSError, match="Too many open files"):
        pool.take(8 * SLAB)
    assert pool.used == 0
    assert open_descriptors() == before + sum(counts(pool)) - 2
    with descriptors_left(0):
        while pool.prepare(0):
            pass
        with pytest.raises(OSError, match="Too many open files"):
            pool.prepare(8)
    whole = pool.take(8 * SLAB)
    assert is_zero(whole)


OTHERS_HOLD_ON = """
import os
from fleetstart.native import Region, SlabPool
SLAB = 2 * 1024 * 1024
pool = SlabPool("held", pages="thp", slab_bytes=SLAB, capacity=1)
others = []
for _ in range(6):
    region = pool.take(SLAB)
    others.append(Region.attach([os.dup(fd) for fd in region.fds], SLAB))
    region.view(0, SLAB)[:] = bytes([len(others)]) * SLAB
    del region
    pool.release(1)
print([other.view(SLAB - 1, 1)[0] for other in others])
"""


@pytest.mark.parametrize("pages", ["thp"], indirect=True)
@pytest.mark.usefixtures("pages")
def test_memory_that_others_still_hold_is_no_sigbus_for_the_owner(start: Start) -> None:
    """Huge pages on demand have a file system, which has a size of its own."""
    assert hear(start(OTHERS_HOLD_ON)) == "[1, 2, 3, 4, 5, 6]"
