"""Laws of a slab pool under any sequence of calls: memory is zero when taken, counted once, and within the capacity."""

from __future__ import annotations

import errno
import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.native import Region
from tests.native.neighbours import SLAB, Pages, open_descriptors
from tests.native.pools import CAPACITY, ZEROS, counts, is_zero, pool_of, soil

STEPS = st.one_of(
    st.tuples(st.just("take"), st.integers(0, (CAPACITY + 1) * SLAB)),
    st.tuples(st.just("some"), st.integers(0, 2 * CAPACITY)),
    st.tuples(st.just("grant"), st.integers(0, CAPACITY)),
    st.tuples(st.just("drop"), st.integers(0, CAPACITY)),
    st.tuples(st.just("prepare"), st.integers(0, CAPACITY + 1)),
    st.tuples(st.just("release"), st.integers(0, CAPACITY + 1)),
)


class Tried:
    """A pool, the regions that are held of it, and how many slabs of each count as used."""

    def __init__(self, pages: Pages) -> None:
        self.pool = pool_of(pages)
        self.held: list[Region] = []
        self.granted: dict[int, int] = {}

    def step(self, what: str, number: int) -> None:
        if what == "take":
            self.take(number)
        elif what == "some":
            self.some([position for position in range(3) if number >> position & 1])
        elif what == "grant" and self.held:
            self.grant(self.held[number % len(self.held)])
        elif what == "drop" and self.held:
            self.granted.pop(id(self.held.pop(number % len(self.held))))
        elif what == "prepare":
            self.prepare(number)
        elif what == "release":
            _, clean, dirty = counts(self.pool)
            assert self.pool.release(number) == min(number, clean + dirty)
            assert self.pool.dirty == max(0, dirty - number)

    def take(self, size_bytes: int) -> None:
        before = counts(self.pool)
        if self.pool.used + max(1, -(-size_bytes // SLAB)) > CAPACITY:
            with pytest.raises(OSError, match="slabs of a pool of 4") as raised:
                self.pool.take(size_bytes)
            assert raised.value.errno == errno.ENOMEM
            assert counts(self.pool) == before
            return
        region = self.pool.take(size_bytes)
        self.held.append(region)
        self.granted[id(region)] = len(region.fds)
        assert is_zero(region)
        soil(region)

    def some(self, positions: list[int]) -> None:
        """Some bytes of a region of three slabs, which may be more than there are."""
        if self.pool.used + len(positions) > CAPACITY:
            with pytest.raises(OSError, match="slabs of a pool of 4"):
                self.pool.take_some(3 * SLAB, positions)
            return
        region = self.pool.take_some(3 * SLAB, positions)
        self.held.append(region)
        self.granted[id(region)] = len(positions)
        for position in range(3):
            if position in positions:
                assert bytes(region.view(position * SLAB, SLAB)) == ZEROS
                region.view(position * SLAB, SLAB)[:] = b"\xbb" * SLAB
            else:
                with pytest.raises(IndexError, match="not granted"):
                    region.view(position * SLAB, 1)

    def grant(self, region: Region) -> None:
        before = counts(self.pool)
        missing = len(region.fds) - self.granted[id(region)]
        if self.pool.used + missing > CAPACITY:
            with pytest.raises(OSError, match="slabs of a pool of 4"):
                self.pool.grant(region, range(len(region.fds)))
            assert counts(self.pool) == before
            return
        self.pool.grant(region, range(len(region.fds)))
        self.granted[id(region)] += missing
        assert sum(counts(self.pool)) == min(CAPACITY, sum(before) + missing)
        soil(region)

    def prepare(self, wanted: int) -> None:
        used, clean, dirty = counts(self.pool)
        did = self.pool.prepare(wanted)
        assert did == (dirty > 0 or (clean < wanted and used + clean + dirty < CAPACITY))
        assert self.pool.clean == clean + did


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.lists(STEPS, max_size=15))
def test_memory_is_zero_when_taken_counted_once_and_within_the_capacity_whatever_happens(
    pages: Pages, steps: list[tuple[str, int]]
) -> None:
    gc.collect()
    at_first = open_descriptors()
    tried = Tried(pages)
    pool, held = tried.pool, tried.held
    without_slabs = open_descriptors() - pool.clean
    for what, number in steps:
        tried.step(what, number)
        assert pool.used == sum(tried.granted.values())
        assert sum(counts(pool)) <= CAPACITY
        sparse = sum(len(region.fds) for region in held) - pool.used
        assert open_descriptors() == without_slabs + sum(counts(pool)) + sparse
    held.clear()
    assert pool.used == 0
    del tried, pool
    gc.collect()  # what was raised holds the frames that it passed
    assert open_descriptors() == at_first
