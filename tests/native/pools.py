"""Slab pools for tests, and checks that hold for each."""

from __future__ import annotations

import gc
import os

from fleetstart.native import Region, SlabPool
from tests.native.neighbours import SLAB, Pages

CAPACITY = 4
ZEROS = bytes(SLAB)


def pool_of(pages: Pages, capacity: int = CAPACITY, name: str = "pool") -> SlabPool:
    gc.collect()  # regions that a former test's exception holds are pages of the few that are reserved
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
