"""Slab pools: memory is zero when it is taken, comes back with its last use, and is never more than the capacity."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
from torch.utils.dlpack import from_dlpack

from fleetstart.native import Region
from tests.native.neighbours import SLAB, Pages, hugetlb_kib, open_descriptors, rollup
from tests.native.pools import CAPACITY, counts, is_zero, pool_of, soil
from tests.servers import wait_until


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
        return hugetlb_kib() if pages == "hugetlb" else rollup("Pss_Shmem")

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


@pytest.mark.slow
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
    reserved, resident = hugetlb_kib(), rollup("Rss")
    while pool.prepare(16):
        pass
    assert counts(pool) == (0, 16, 0)
    if pages == "hugetlb":
        assert hugetlb_kib() >= reserved + 15 * SLAB // 1024
    else:
        assert rollup("Rss") >= resident + 14 * SLAB // 1024  # of 16: other memory may go meanwhile


def test_release_gives_memory_back_to_the_system(pages: Pages) -> None:
    def taken() -> int:
        return hugetlb_kib() if pages == "hugetlb" else rollup("Pss_Shmem")

    pool = pool_of(pages, capacity=32)
    before, descriptors = taken(), open_descriptors()
    soil(pool.take(32 * SLAB))
    assert taken() > before + 30 * SLAB // 1024
    assert pool.release(1000) == 32
    assert counts(pool) == (0, 0, 0)
    wait_until(lambda: taken() <= before)
    assert open_descriptors() <= descriptors
