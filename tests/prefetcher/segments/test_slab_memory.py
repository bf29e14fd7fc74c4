"""Slab memory: kinds of pages, slabs kept ready, and workers before kept slabs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.segments.slab_memory import (
    MAX_SLABS,
    SegmentMemory,
    free_hugetlb_bytes,
    open_pool,
    slab_size,
)
from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.weights.manifest import CHUNK_BYTES
from tests.servers import wait_until

SLAB = slab_size(64 << 20)


@contextmanager
def memory(*, slabs: int, keep: int = 0, others: int = 0) -> Iterator[tuple[SegmentMemory, list[int]]]:
    """Slab memory, and the bytes reserved for others, which a test may change."""
    others_bytes = [others * SLAB]
    made = SegmentMemory(
        budget_bytes=slabs * SLAB, keep_bytes=keep * SLAB, others_bytes=lambda: others_bytes[0], kinds=("small",)
    )
    try:
        yield made, others_bytes
    finally:
        made.close()


@given(st.integers(1, 1 << 44))
def test_slabs_hold_a_chunk_and_are_not_too_many(budget_bytes: int) -> None:
    size = slab_size(budget_bytes)
    assert size >= CHUNK_BYTES
    assert size & (size - 1) == 0
    assert budget_bytes / size <= MAX_SLABS
    assert size == CHUNK_BYTES or budget_bytes / (size // 2) > MAX_SLABS


def test_reserved_huge_pages_are_read_from_meminfo() -> None:
    text = "MemTotal: 1 kB\nHugePages_Total:     600\nHugePages_Free:      512\nHugepagesize:       2048 kB\n"
    assert free_hugetlb_bytes(text) == 1 << 30
    assert free_hugetlb_bytes("MemTotal: 1 kB\n") == 0


def test_the_best_pages_that_the_machine_gives_are_taken_and_the_others_refusals_kept() -> None:
    pool, refused = open_pool("test", 64 << 20)

    kinds = ["hugetlb", "thp", "small"]
    assert list(refused) == kinds[: kinds.index(pool.pages)]
    assert all(refused.values())
    assert pool.capacity * pool.slab_bytes == 64 << 20


def test_slabs_are_made_ahead_and_what_comes_back_is_cleared() -> None:
    with memory(slabs=4, keep=2) as (pool, _):
        wait_until(lambda: pool.report().free_bytes == 2 * SLAB, what="two slabs")
        region = pool.allocate(SLAB)
        region.view(0, 5)[:] = b"weights"[:5]
        assert pool.used_bytes == SLAB
        del region
        pool.replenish()
        wait_until(lambda: pool._pool.dirty == 0, what="clearing")
        assert pool.used_bytes == 0
        assert bytes(pool.allocate(3 * SLAB).view(0, SLAB)) == bytes(SLAB)


def shrunk(pool: SegmentMemory) -> int:
    pool.shrink()
    return pool.report().free_bytes


def test_workers_come_before_what_is_kept() -> None:
    with memory(slabs=4, keep=3, others=2) as (pool, others_bytes):
        wait_until(lambda: pool.report().free_bytes == 2 * SLAB, what="what is left")
        others_bytes[0] += SLAB
        wait_until(lambda: shrunk(pool) == SLAB, what="room for the worker")  # the thread may just have made one
        pool.replenish()
        wait_until(lambda: not pool._wake.is_set(), what="the thread to look")
        assert pool.report().free_bytes == SLAB

        others_bytes[0] = 0
        pool.replenish()
        wait_until(lambda: pool.report().free_bytes == 3 * SLAB, what="what is kept")


def test_more_than_there_is_is_unavailable_and_changes_nothing() -> None:
    with memory(slabs=2) as (pool, _):
        held = pool.allocate(SLAB + 1)
        with pytest.raises(Unavailable, match="no memory for"):
            pool.allocate(1)
        assert pool.used_bytes == 2 * SLAB
        del held
        assert pool.allocate(2 * SLAB).size_bytes == 2 * SLAB
