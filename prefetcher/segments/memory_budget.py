"""The memory budget of a node's segments: which are held, what they take, and eviction for new ones.

Workers reserve memory of the same budget. Segments in use are never evicted; `eviction` chooses among the others.
`store` fills segments and wakes their waiters.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from fleetstart.runtime.contract.errors import CheckpointInvalid, Unavailable
from fleetstart.runtime.contract.ids import CheckpointId

from ..concurrency.threads import in_thread
from .eviction import EvictionCandidate, choose_evictions
from .segment import Segment
from .slab_memory import SegmentMemory

log = logging.getLogger(__name__)


class MemoryBudget:
    """The budget and the segments in it. `changed` is called after evictions."""

    def __init__(
        self,
        *,
        memory_bytes: int,
        workers_bytes: Callable[[], int],
        keep_bytes: int,
        keep_idle: bool,
        changed: Callable[[], None],
        reclaim: Callable[[int], object] = lambda needed_bytes: None,
    ) -> None:
        """`reclaim` frees so many bytes of `workers_bytes` if it can: what was imported ahead is given up first."""
        self._reclaim = reclaim
        self._keep_idle = keep_idle
        self._memory_bytes = memory_bytes
        self._workers_bytes = workers_bytes
        self._changed = changed
        self.memory = SegmentMemory(budget_bytes=memory_bytes, keep_bytes=keep_bytes, others_bytes=workers_bytes)
        self.segments: dict[CheckpointId, Segment] = {}
        self.evictions = 0
        self._retired: list[Segment] = []
        """Failed segments that workers still have attached: their memory counts."""

    @property
    def used_bytes(self) -> int:
        return sum(segment.size_bytes for segment in (*self.segments.values(), *self._retired))

    def reserve(self, needed_bytes: int, purpose: str) -> None:
        """Evicts segments until so many bytes are free beside workers and segments. Errors: Unavailable, with the
        figures."""
        if (lacking_bytes := needed_bytes - self._free_bytes()) > 0:
            self._reclaim(lacking_bytes)
        workers_bytes, free_bytes = self._workers_bytes(), self._free_bytes()
        candidates = self._candidates()
        chosen = choose_evictions(needed_bytes, free_bytes, candidates, time.monotonic())
        if chosen is None:
            pinned_bytes = self.used_bytes - sum(entry.size_bytes for entry in candidates if not entry.pinned)
            raise Unavailable(
                f"{purpose} needs {needed_bytes:,} bytes; of the node's {self._memory_bytes:,}, workers have "
                f"{workers_bytes:,} and segments in use {pinned_bytes:,}",
                hint="wait for workers to end, lower the functions' memory, or raise FS_NODE_MEMORY",
                retry_after_s=5.0,
            )
        for checkpoint in chosen:
            segment = self.segments.pop(checkpoint)
            self.evictions += 1
            log.info("segment evicted", extra={"checkpoint": checkpoint, "size_bytes": segment.size_bytes})
            self._evict(segment)
        if chosen:
            self._changed()

    def _free_bytes(self) -> int:
        return self._memory_bytes - self._workers_bytes() - self.used_bytes

    @property
    def free_bytes(self) -> int:
        """Memory that neither workers nor segments have."""
        return max(0, self._free_bytes())

    async def allocate(self, segment: Segment, chunks: Collection[int]) -> None:
        """Reserves and allocates memory for these chunks. Errors: Unavailable, CheckpointInvalid."""
        assert segment.manifest is not None
        name = f"checkpoint {segment.checkpoint[:12]}"
        total_bytes = segment.manifest.total_bytes
        if total_bytes == 0:
            raise CheckpointInvalid(f"{name} has no bytes")
        slabs = segment.slabs_of(chunks, self.memory.slab_bytes)
        size_bytes = len(slabs) * self.memory.slab_bytes
        if size_bytes > self.memory.capacity_bytes:
            raise Unavailable(
                f"{name} needs {size_bytes:,} bytes of memory for weights, the node has {self.memory.capacity_bytes:,}",
                hint="raise FS_NODE_MEMORY, or use a node with more memory",
            )
        self.reserve(size_bytes, name)
        segment.size_bytes = size_bytes  # counts from here on, before the memory exists
        segment.granted = slabs
        segment.region = await in_thread(lambda: self.memory.allocate(total_bytes, slabs), f"memory-{name[11:19]}")

    def grant(self, segment: Segment, chunks: Collection[int]) -> None:
        """Allocates memory for more chunks of a segment. Errors: Unavailable; then nothing has changed."""
        assert segment.region is not None
        slabs = segment.slabs_of(chunks, self.memory.slab_bytes) - segment.granted
        if not slabs:
            return
        size_bytes = len(slabs) * self.memory.slab_bytes
        self.reserve(size_bytes, f"more of checkpoint {segment.checkpoint[:12]}")
        self.memory.grant(segment.region, slabs)
        segment.size_bytes += size_bytes
        segment.granted |= slabs

    def discard(self, segment: Segment) -> None:
        """Drops a segment that never opened or that no worker has."""
        self.segments.pop(segment.checkpoint, None)
        self._evict(segment)

    def retire(self, segment: Segment) -> None:
        """Drops a failed segment: the next request for its checkpoint opens another. Its memory is freed with its
        last worker."""
        if self.segments.get(segment.checkpoint) is not segment:
            return
        del self.segments[segment.checkpoint]
        if segment.pins:
            self._retired.append(segment)
        else:
            self._evict(segment)

    def on_unpinned(self, segment: Segment) -> None:
        """Frees a segment without workers, if it has failed or idle segments are not kept; otherwise it stays warm."""
        if not self._keep_idle and segment in self.segments.values():
            self.discard(segment)
            self._changed()
        if segment in self._retired:
            self._retired.remove(segment)
            self._evict(segment)
            self._changed()

    def close(self) -> None:
        """Drops all segments; the memory is freed with its last user."""
        self.segments.clear()
        self._retired.clear()
        self.memory.close()

    def _evict(self, segment: Segment) -> None:
        """Releases a segment's memory to the pool; a thread may hold the last reference for a moment."""
        if segment.fetch is not None:
            segment.fetch.fail(Unavailable(f"checkpoint {segment.checkpoint[:12]} was evicted"))
        segment.region = None
        segment.control = None
        segment.fetch = None
        self.memory.replenish()

    def _candidates(self) -> list[EvictionCandidate]:
        return [
            EvictionCandidate(
                checkpoint=segment.checkpoint,
                size_bytes=segment.size_bytes,
                fetch_s=segment.fetch_s,
                uses=segment.uses,
                last_used_s=segment.last_used_ns / 1e9,
                pinned=bool(segment.pins) or segment.state == "filling",
            )
            for segment in self.segments.values()
        ]
