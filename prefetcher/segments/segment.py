"""A segment: one checkpoint in a node's memory, whole or in part. Its users, its chunks, its descriptors.

`store` opens, fills and evicts; this class only holds the state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable
from typing import Literal

from fleetstart import native
from fleetstart.runtime.contract.errors import FleetError, Unavailable
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from fleetstart.runtime.contract.node.reports import SegmentReport
from fleetstart.runtime.contract.weights.manifest import Manifest
from fleetstart.runtime.contract.weights.stage import stage_chunks

from ..fetch.fetcher import Fetch
from .feeds import SegmentFeed

Layers = tuple[int, int]
"""(first, end) layers of a pipeline stage."""


class Segment:
    """One segment. `fetch_span_ns` is (begin, end) of the latest fetch; end is 0 while it is filling."""

    def __init__(self, checkpoint: CheckpointId, opened: asyncio.Future[None]) -> None:
        self.checkpoint = checkpoint
        self.opened = opened
        self.filled = asyncio.Event()
        """Set when all requested chunks are present, or the segment has failed."""
        self.pins: set[WorkerId] = set()
        self.uses = 0
        self.last_used_ns = time.monotonic_ns()
        self.fetch_span_ns = (time.monotonic_ns(), 0)
        self.error: FleetError | None = None
        self.size_bytes = 0
        """Reserved part of the node's memory."""
        self.granted: set[int] = set()
        """Slabs of its region that it may fill."""
        self.checked: set[int] = set()
        """Chunks whose digests were checked; written by the thread that checks them."""
        self.verified = asyncio.Event()
        """Set when the digests of what came first were checked, or the segment has failed."""
        self.growths: set[asyncio.Future[None]] = set()
        """Futures of those who wait for the whole checkpoint."""
        self.manifest: Manifest | None = None
        self.region: native.Region | None = None
        self.control: native.ControlBlock | None = None
        self.fetch: Fetch | None = None
        self.feed: SegmentFeed | None = None
        """The peers of its fetch; None where the node reads from none."""
        self._stages: dict[Layers, Collection[int]] = {}
        self._reported_traffic: dict[str, tuple[int, float]] = {}
        self._spent_s = 0.0
        self._spent_bytes = 0

    @property
    def state(self) -> Literal["filling", "partial", "ready", "failed"]:
        if self.error is not None:
            return "failed"
        if not self.filled.is_set():
            return "filling"
        return "ready" if self.fetch is not None and self.fetch.progress.is_whole else "partial"

    @property
    def is_complete(self) -> bool:
        """True if it has failed, or has all chunks there are: no source is asked for more."""
        return self.error is not None or (self.fetch is not None and self.fetch.progress.is_whole)

    def needed(self, stage: Layers | None) -> Collection[int]:
        """The stage's chunks, in the order of use; all chunks for the whole model."""
        assert self.manifest is not None
        if stage is None:
            return range(len(self.manifest.chunks))
        if stage not in self._stages:
            self._stages[stage] = stage_chunks(self.manifest, *stage)
        return self._stages[stage]

    def slabs_of(self, chunks: Iterable[int], slab_bytes: int) -> set[int]:
        """Slabs that hold these chunks. A chunk lies in one slab, because both sizes are powers of two."""
        assert self.manifest is not None
        chunk_bytes = self.manifest.chunk_bytes
        return {chunk * chunk_bytes // slab_bytes for chunk in chunks}

    def descriptors(self) -> list[int]:
        """Descriptors of control block and slabs. They stay ours; sending them duplicates them."""
        assert self.region is not None
        assert self.control is not None
        return [self.control.fd, *self.region.fds]

    def report(self) -> SegmentReport:
        size_bytes = self.region.size_bytes if self.region is not None else 0
        if self.fetch is None:
            return SegmentReport(self.checkpoint, self.state, size_bytes, 0)
        progress = self.fetch.progress
        counted_unix_ns = 0 if self.filled.is_set() else time.time_ns()
        ready_bytes, ranges = progress.ready_bytes, progress.ranges()
        return SegmentReport(self.checkpoint, self.state, size_bytes, ready_bytes, ranges, counted_unix_ns)

    # ── growth ─────────────────────────────────────────────────────────────────────────────────────

    def require_fetch(self) -> Fetch:
        """The fetch. Errors: the segment's own error; Unavailable if it was evicted."""
        if self.error is not None:
            raise self.error
        if self.fetch is None:
            raise Unavailable(f"checkpoint {self.checkpoint[:12]} was evicted", retry_after_s=1.0)
        return self.fetch

    def end_growths(self, error: FleetError | None) -> None:
        """Wakes those who wait for the whole checkpoint."""
        for growth in self.growths:
            if growth.done():
                continue
            if error is None:
                growth.set_result(None)
            else:
                growth.set_exception(error)

    # ── fetch times ────────────────────────────────────────────────────────────────────────────────

    def start_filling(self, now_ns: int) -> None:
        """More chunks are requested. A fetch in progress keeps its begin."""
        if self.filled.is_set():
            self.filled.clear()
            self.fetch_span_ns = (now_ns, 0)

    def stop_filling(self, now_ns: int) -> None:
        """Ends the fetch time: all requested chunks are present, or will not come."""
        begin_ns, end_ns = self.fetch_span_ns
        self.filled.set()
        if end_ns or self.fetch is None:
            return
        self.fetch_span_ns = (begin_ns, now_ns)
        self._spent_s += (now_ns - begin_ns) / 1e9
        self._spent_bytes = self.fetch.progress.ready_bytes

    @property
    def fetch_s(self) -> float:
        """Estimated time to fetch what is present again, at full speed."""
        ready_bytes = self.fetch.progress.ready_bytes if self.fetch is not None else 0
        return self._spent_s * max(1.0, ready_bytes / max(1, self._spent_bytes))

    def new_traffic(self) -> dict[str, tuple[int, float]]:
        """Bytes and seconds by source since the last call, without background reads."""
        traffic = self.fetch.traffic() if self.fetch is not None else {}
        before, self._reported_traffic = self._reported_traffic, traffic
        return {
            source: (size_bytes - before.get(source, (0, 0.0))[0], busy_s - before.get(source, (0, 0.0))[1])
            for source, (size_bytes, busy_s) in traffic.items()
        }
