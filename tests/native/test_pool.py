"""Slab pools: memory is zero when it is taken, comes back with its last use, and is never more than the capacity."""

from __future__ import annotations

import errno
import gc
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.dlpack import from_dlpack

from fleetstart.native import Region, SlabPool
from tests.native.neighbours import (
    PATIENCE_S,
    SLAB,
    Pages,
    Start,
    hear,
    lets_others_run,
    meminfo,
    open_descriptors,
    rollup,
)
from tests.servers import wait_until

CAPACITY = 4
ZEROS = bytes(SLAB)


def pool_of(pages: Pages, capacity: int = CAPACITY, name: str = "pool") -> SlabPool:
    return SlabPool(name, pages=pages, slab_bytes=SLAB, capacity=capacity)


def counts(pool: SlabPool) -> tuple[int, int, int]:
    return pool.used, pool.clean, pool.dirty


def soil(region: Region, byte: int = 0xAA) -> None:
    for begin in range(0, region.size_bytes, SLAB):
        size = min(SLAB, region.size_bytes - begin)
        region.view(begin, size)[:] = bytes([byte]) * size


def is_zero(region: Region) -> bool:
    """Also what its last slab has past its end."""
    return all(os.pread(fd, SLAB, 0) == ZEROS for fd in region.fds)


# ── what is taken and what comes back ──────────────────────────────────────────────────────────────

STEPS = st.one_of(
    st.tuples(st.just("take"), st.integers(0, (CAPACITY + 1) * SLAB)),
    st.tuples(st.just("some"), st.integers(0, 2 * CAPACITY)),
    st.tuples(st.just("grant"), st.integers(0, CAPACITY)),
    st.tuples(st.just("drop"), st.integers(0, CAPACITY)),
    st.tuples(st.just("prepare"), st.integers(0, CAPACITY + 1)),
    st.tuples(st.just("release"), st.integers(0, CAPACITY + 1)),
)


@settings(max_examples=20, deadline=None)
@given(st.lists(STEPS, max_size=15))
def test_memory_is_zero_when_taken_counted_once_and_within_the_capacity_whatever_happens(
    pages: Pages, steps: list[tuple[str, int]]
) -> None:
    gc.collect()
    at_first = open_descriptors()
    pool = pool_of(pages)
    without_slabs = open_descriptors() - pool.clean
    held: list[Region] = []
    granted: dict[int, int] = {}
    for step, number in steps:
        used, clean, dirty = counts(pool)
        if step == "take" and used + max(1, -(-number // SLAB)) > CAPACITY:
            with pytest.raises(OSError, match="slabs of a pool of 4") as raised:
                pool.take(number)
            assert raised.value.errno == errno.ENOMEM
            assert counts(pool) == (used, clean, dirty)
        elif step == "take":
            held.append(pool.take(number))
            granted[id(held[-1])] = len(held[-1].fds)
            assert is_zero(held[-1])
            soil(held[-1])
        elif step == "some":  # of a region of three slabs, which may be more than there are
            positions = [position for position in range(3) if number >> position & 1]
            if used + len(positions) > CAPACITY:
                with pytest.raises(OSError, match="slabs of a pool of 4"):
                    pool.take_some(3 * SLAB, positions)
                continue
            held.append(pool.take_some(3 * SLAB, positions))
            granted[id(held[-1])] = len(positions)
            for position in range(3):
                if position in positions:
                    assert bytes(held[-1].view(position * SLAB, SLAB)) == ZEROS
                    held[-1].view(position * SLAB, SLAB)[:] = b"\xbb" * SLAB
                else:
                    with pytest.raises(IndexError, match="not granted"):
                        held[-1].view(position * SLAB, 1)
        elif step == "grant" and held:
            region = held[number % len(held)]
            missing = len(region.fds) - granted[id(region)]
            if used + missing > CAPACITY:
                with pytest.raises(OSError, match="slabs of a pool of 4"):
                    pool.grant(region, range(len(region.fds)))
                assert counts(pool) == (used, clean, dirty)
            else:
                pool.grant(region, range(len(region.fds)))
                granted[id(region)] += missing
                assert sum(counts(pool)) == min(CAPACITY, used + missing + clean + dirty)
                soil(region)
            del region
        elif step == "drop" and held:
            granted.pop(id(held.pop(number % len(held))))
        elif step == "prepare":
            did = pool.prepare(number)
            assert did == (dirty > 0 or (clean < number and used + clean + dirty < CAPACITY))
            assert pool.clean == clean + did
        elif step == "release":
            assert pool.release(number) == min(number, clean + dirty)
            assert pool.dirty == max(0, dirty - number)
        assert pool.used == sum(granted.values())
        assert sum(counts(pool)) <= CAPACITY
        sparse = sum(len(region.fds) for region in held) - pool.used
        assert open_descriptors() == without_slabs + sum(counts(pool)) + sparse
    held.clear()
    assert pool.used == 0
    del pool
    assert open_descriptors() == at_first


def test_what_was_attached_before_it_was_granted_sees_what_comes_then(pages: Pages) -> None:
    pool = pool_of(pages)
    region = pool.take_some(3 * SLAB, [1])
    reader = Region.attach([os.dup(fd) for fd in region.fds], 3 * SLAB)
    region.view(SLAB, 5)[:] = b"first"
    assert pool.used == 1

    pool.grant(region, [1, 2])
    assert pool.used == 2
    region.populate(2 * SLAB, SLAB)
    region.view(3 * SLAB - 4, 4)[:] = b"then"

    assert bytes(reader.view(SLAB, 5)) == b"first"
    assert bytes(reader.view(3 * SLAB - 4, 4)) == b"then"
    del region
    assert counts(pool)[0] == 0
    assert pool.dirty <= 2, "what was sparse goes back to the system"


def test_sparse_slabs_take_no_memory(pages: Pages) -> None:
    def taken() -> int:
        return -meminfo("HugePages_Free") * SLAB // 1024 if pages == "hugetlb" else rollup("Pss_Shmem")

    pool = pool_of(pages, capacity=2)
    pool.release(2)
    before = taken()
    region = pool.take_some(64 * SLAB, [])
    assert taken() <= before
    assert len(region.fds) == 64
    assert counts(pool) == (0, 0, 0)


def test_free_slabs_give_way_to_what_is_granted(pages: Pages) -> None:
    pool = pool_of(pages, capacity=3)
    region = pool.take_some(2 * SLAB, [])
    while pool.prepare(3):
        pass
    assert counts(pool) == (0, 3, 0)
    pool.grant(region, [0, 1])
    assert counts(pool) == (2, 1, 0)
    with pytest.raises(OSError, match="slabs of a pool of 3"):
        pool.take(2 * SLAB)


def test_grants_that_cannot_be(pages: Pages) -> None:
    pool = pool_of(pages)
    region = pool.take_some(2 * SLAB, [0])
    for wrong in ([2], [0, 2**63]):
        with pytest.raises(IndexError):
            pool.grant(region, wrong)
        with pytest.raises(IndexError):
            pool.take_some(2 * SLAB, wrong)
    attached = Region.attach([os.dup(fd) for fd in region.fds], 2 * SLAB)
    for other in (attached, pool_of(pages).take(SLAB)):
        with pytest.raises(ValueError, match="another pool"):
            pool.grant(other, [0])
    assert pool.used == 1


def test_slabs_come_back_with_the_last_view_capsule_or_tensor(pages: Pages) -> None:
    pool = pool_of(pages)
    region = pool.take(2 * SLAB)
    uses: list[Any] = [region.view(0, 8)[2:4], region.dlpack(0, [8], "U8"), from_dlpack(region.dlpack(SLAB, [8], "U8"))]
    uses.append(uses[-1][2:4])
    del region
    while uses:
        gc.collect()
        assert pool.used == 2
        uses.pop(0)
    assert pool.used == 0
    assert pool.dirty == 2


def test_a_pool_outlives_its_name_as_long_as_its_memory_is_used(pages: Pages) -> None:
    before = open_descriptors()
    pool = pool_of(pages)
    region = pool.take(2 * SLAB)
    view = region.view(SLAB, 5)
    del pool, region
    view[:] = b"still"
    assert bytes(view) == b"still"
    del view
    assert open_descriptors() == before


def test_clean_slabs_are_taken_before_dirty_ones_and_these_before_new_ones(pages: Pages) -> None:
    pool = pool_of(pages)
    pool.release(CAPACITY)
    soil(pool.take(2 * SLAB))
    assert counts(pool) == (0, 0, 2)
    assert pool.prepare(0)
    first = pool.take(SLAB)
    assert counts(pool) == (1, 0, 1)
    second = pool.take(2 * SLAB)
    assert counts(pool) == (3, 0, 0)
    assert is_zero(first)
    assert is_zero(second)


def test_what_is_prepared_has_its_pages(pages: Pages) -> None:
    pool = pool_of(pages, capacity=16)
    free, resident = meminfo("HugePages_Free"), rollup("Rss")
    while pool.prepare(16):
        pass
    assert counts(pool) == (0, 16, 0)
    if pages == "hugetlb":
        assert meminfo("HugePages_Free") <= free - 15
    else:
        assert rollup("Rss") >= resident + 15 * SLAB // 1024


def test_release_gives_memory_back_to_the_system(pages: Pages) -> None:
    def taken() -> int:
        return -meminfo("HugePages_Free") * SLAB // 1024 if pages == "hugetlb" else rollup("Pss_Shmem")

    pool = pool_of(pages, capacity=32)
    before, descriptors = taken(), open_descriptors()
    soil(pool.take(32 * SLAB))
    assert taken() > before + 30 * SLAB // 1024
    assert pool.release(1000) == 32
    assert counts(pool) == (0, 0, 0)
    wait_until(lambda: taken() <= before)
    assert open_descriptors() <= descriptors


# ── what cannot be ─────────────────────────────────────────────────────────────────────────────────


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


def test_memory_that_others_still_hold_is_no_sigbus_for_the_owner(pages: Pages, start: Start) -> None:
    if pages != "thp":
        pytest.skip("only a file system has a size of its own")
    assert hear(start(OTHERS_HOLD_ON)) == "[1, 2, 3, 4, 5, 6]"


# ── threads ────────────────────────────────────────────────────────────────────────────────────────


def run_together(*works: Callable[[], None]) -> None:
    """Each in a thread; the first failure is raised."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


def test_threads_that_prepare_take_and_drop_get_zeros_and_lose_nothing(pages: Pages) -> None:
    pool = pool_of(pages, capacity=6)
    over = threading.Event()
    short = 0

    def prepare() -> None:
        while not over.is_set():
            pool.prepare(3)

    def give_back() -> None:
        while not over.is_set():
            pool.release(1)
            over.wait(0.01)

    def use() -> None:
        nonlocal short
        for size in [SLAB, 3 * SLAB, 2 * SLAB - 5] * 10:
            try:
                region = pool.take(size)
            except OSError as error:
                assert error.errno == errno.ENOMEM  # noqa: PT017
                short += 1
            else:
                assert is_zero(region)
                soil(region)
            assert sum(counts(pool)) <= 6

    def users() -> None:
        try:
            run_together(use, use, use)
        finally:
            over.set()

    run_together(users, prepare, prepare, give_back)
    assert short < 90
    assert pool.used == 0
    assert is_zero(pool.take(6 * SLAB))


def test_slabs_that_are_being_cleared_are_not_missed_by_who_needs_them_all(pages: Pages) -> None:
    pool = pool_of(pages)
    over = threading.Event()

    def prepare() -> None:
        while not over.is_set():
            pool.prepare(CAPACITY)

    def use() -> None:
        try:
            for _ in range(40):
                soil(pool.take(CAPACITY * SLAB))
        finally:
            over.set()

    run_together(use, prepare, prepare)


def test_threads_that_prepare_together_make_no_more_than_is_wanted(pages: Pages) -> None:
    for _ in range(10):
        pool = pool_of(pages, capacity=8)
        pool.release(8)
        run_together(*[lambda pool=pool: pool.prepare(2)] * 4)
        assert counts(pool) == (0, 2, 0)


def test_taking_and_preparing_let_other_threads_run(pages: Pages) -> None:
    pool = pool_of(pages, capacity=8)
    assert lets_others_run(lambda: (pool.release(8), pool.prepare(8)))
    soil(pool.take(8 * SLAB))
    assert lets_others_run(lambda: pool.take(8 * SLAB))
