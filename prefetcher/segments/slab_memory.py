"""Slab memory of a node's segments: kind of pages, slabs kept ready, memory given back to the system.

Slabs of one size are reused, because making memory costs as much as filling it, and huge pages set the speed of
direct reads (README, "Weights"). A thread clears returned slabs and makes new ones up to `keep_bytes` ahead, at the
lowest priority. Slabs in use and slabs kept never exceed what the node's budget leaves beside its workers.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

from fleetstart import native
from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.node.reports import MemoryReport
from fleetstart.runtime.contract.sizes import GIB
from fleetstart.runtime.contract.weights.manifest import CHUNK_BYTES

log = logging.getLogger(__name__)

Pages = Literal["hugetlb", "thp", "small"]
KINDS: tuple[Pages, ...] = ("hugetlb", "thp", "small")
HUGETLB_MIN_BYTES = GIB
"""Fewer reserved huge pages than that were not reserved for this node."""
MAX_SLABS = 512
"""Each slab is one descriptor here, and one mapping in the workers that attach it: some 4 µs of their start."""
LOWEST_PRIORITY = 19
DELAY_S = 0.5
"""Pause before slabs are cleared or made: a worker that has just got its weights serves its first call in that time,
and on busy cores priorities count only among the threads of one process or group."""
CLOSE_S = 2.0


def slab_size(budget_bytes: int) -> int:
    """A power of two that gives at most MAX_SLABS slabs; no smaller than a chunk, which must lie in one slab."""
    size = CHUNK_BYTES
    while size * MAX_SLABS < budget_bytes:
        size *= 2
    return size


def free_hugetlb_bytes(meminfo: str) -> int:
    """Free reserved huge pages, from the text of /proc/meminfo."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    count, size_kib = (int(fields.get(name, "0").split()[0]) for name in ("HugePages_Free", "Hugepagesize"))
    return count * size_kib * 1024


def open_pool(name: str, budget_bytes: int, kinds: Sequence[Pages] = KINDS) -> tuple[native.SlabPool, dict[str, str]]:
    """A pool of the first kind of pages that the machine supports, and why the kinds before it failed."""
    slab_bytes = slab_size(budget_bytes)
    refused: dict[str, str] = {}
    for kind in kinds:
        capacity = max(1, budget_bytes // slab_bytes)
        if kind == "hugetlb":
            free_bytes = free_hugetlb_bytes(Path("/proc/meminfo").read_text())
            if free_bytes < HUGETLB_MIN_BYTES:
                refused[kind] = f"{free_bytes // (1 << 20):,} MiB are reserved and free: sysctl vm.nr_hugepages"
                continue
            capacity = min(capacity, free_bytes // slab_bytes)
        try:
            return native.SlabPool(name, pages=kind, slab_bytes=slab_bytes, capacity=capacity), refused
        except OSError as error:
            refused[kind] = str(error)
    raise Unavailable(f"no shared memory for weights: {refused}")


class SegmentMemory:
    """The slab pool of a node. Thread-safe. `others_bytes` returns the part of the budget reserved for workers."""

    def __init__(
        self,
        *,
        budget_bytes: int,
        keep_bytes: int,
        others_bytes: Callable[[], int],
        kinds: Sequence[Pages] = KINDS,
    ) -> None:
        self._pool, self._refused = open_pool("fleetstart", budget_bytes, kinds)
        self._budget_bytes = budget_bytes
        self._keep = min(keep_bytes, budget_bytes) // self._pool.slab_bytes
        self._others_bytes = others_bytes
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="segment-memory", daemon=True)
        self._wake.set()
        self._thread.start()
        log.info("memory for weights", extra={"pages": self._pool.pages, "refused": self._refused})

    @property
    def capacity_bytes(self) -> int:
        return self._pool.capacity * self._pool.slab_bytes

    @property
    def used_bytes(self) -> int:
        return self._pool.used * self._pool.slab_bytes

    @property
    def slab_bytes(self) -> int:
        return self._pool.slab_bytes

    def allocate(self, size_bytes: int, slabs: Collection[int] | None = None) -> native.Region:
        """A zeroed region, returned to the pool with its last reference. Blocks. Errors: Unavailable if memory is
        short.

        With `slabs`, only these take memory; the others exist once they are granted.
        """
        try:
            if slabs is None:
                return self._pool.take(size_bytes)
            return self._pool.take_some(size_bytes, sorted(slabs))
        except OSError as error:
            raise Unavailable(f"no memory for {size_bytes:,} bytes of weights: {error}", retry_after_s=1.0) from error

    def grant(self, region: native.Region, slabs: Collection[int]) -> None:
        """Adds slabs to a region, all or none; pages come when they are filled. Errors: Unavailable."""
        try:
            self._pool.grant(region, sorted(slabs))
        except OSError as error:
            raise Unavailable(
                f"no memory for {len(slabs)} more slabs of weights: {error}", retry_after_s=1.0
            ) from error
        self.shrink()

    def replenish(self) -> None:
        """Wakes the thread to clear and make slabs, after a pause: an allocator needs processor and bandwidth
        itself."""
        self._wake.set()

    def shrink(self) -> None:
        """Gives free slabs back to the system, as far as workers have reserved their memory."""
        pool = self._pool
        resident_bytes = (pool.used + pool.clean + pool.dirty) * pool.slab_bytes
        excess_bytes = resident_bytes + self._others_bytes() - self._budget_bytes
        if excess_bytes > 0:
            pool.release(-(-excess_bytes // pool.slab_bytes))

    def report(self) -> MemoryReport:
        pool = self._pool
        return MemoryReport(
            pages=pool.pages,
            slab_bytes=pool.slab_bytes,
            used_bytes=pool.used * pool.slab_bytes,
            free_bytes=(pool.clean + pool.dirty) * pool.slab_bytes,
            refused=self._refused,
        )

    def close(self) -> None:
        """Ends the thread. The memory is freed with the pool and its last region."""
        self._stop.set()
        self._wake.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        delay_s = 0.0
        while not self._stop.is_set():
            self._wake.wait()
            self._stop.wait(delay_s)
            self._wake.clear()
            delay_s = DELAY_S
            try:
                while not self._stop.is_set() and self._pool.prepare(self._clean_target()):
                    pass
            except OSError as error:
                log.warning("cannot prefault memory for weights", extra={"error": str(error)})

    def _clean_target(self) -> int:
        """Number of clean slabs to have: as many as are kept, if the budget has room for them beside workers."""
        pool = self._pool
        resident = pool.used + pool.clean + pool.dirty
        free_slabs = (self._budget_bytes - self._others_bytes()) // pool.slab_bytes - resident
        return min(self._keep, pool.clean + max(0, free_slabs))
