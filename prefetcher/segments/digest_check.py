"""The check of digests: the SHA-256 of each chunk in a node's memory, in the background, once for each fetch.

XXH3 has been checked when a chunk came, which finds accidents. A forgery has the same checksum, and only a digest finds
it, which takes longer; so no start waits for it. One thread of low priority checks the chunks of a segment once they
have come, of one segment after the other. `store` evicts a forged segment, and stops its workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from fleetstart import native
from fleetstart.runtime.contract.errors import ChecksumMismatch
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.weights.manifest import ChunkRange, Manifest, chunk_ranges

from .segment import Segment

NICE = 10
"""A tenth of the weight of a worker that computes; at full speed on a core that is idle."""
CLOSE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedDigests:
    """The end of one check."""

    size_bytes: int
    seconds: float
    """From the request on: of a queue of segments, the last waits for the others."""
    forged: ChunkRange | None
    """The first chunk whose bytes are not those that were published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    segment: Segment
    region: weakref.ref[native.Region]
    manifest: Manifest
    present: list[tuple[int, int]]
    loop: asyncio.AbstractEventLoop
    requested_ns: int


class DigestCheck:
    """Checks segments one after the other. Called from the event loop, where `on_checked` is called too; not for a
    segment that was evicted meanwhile."""

    def __init__(self, on_checked: Callable[[Segment, CheckedDigests], None]) -> None:
        self._on_checked = on_checked
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def check(self, segment: Segment) -> None:
        """Checks the chunks that are present and were not checked, if the checkpoint has digests."""
        manifest, region, fetch = segment.manifest, segment.region, segment.fetch
        if manifest is None or region is None or fetch is None or not manifest.digests or self._stopped.is_set():
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="digests", daemon=True)
            self._thread.start()
        self._queue.put(
            _Job(
                segment=segment,
                region=weakref.ref(region),  # its memory is freed at once when it is evicted
                manifest=manifest,
                present=fetch.progress.ranges(),
                loop=asyncio.get_running_loop(),
                requested_ns=time.monotonic_ns(),
            )
        )

    def close(self) -> None:
        self._stopped.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while (job := self._queue.get()) is not None:
            result = self._checked(job)
            if result is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended
                    job.loop.call_soon_threadsafe(self._on_checked, job.segment, result)
            del job  # while it waits, the thread keeps no segment

    def _checked(self, job: _Job) -> CheckedDigests | None:
        """None if the segment was evicted meanwhile."""
        size_bytes = 0
        forged = None
        present = {index for begin, end in job.present for index in range(begin, end)}
        for chunk in chunk_ranges(job.manifest):
            if chunk.index not in present or chunk.index in job.segment.checked:
                continue
            region = job.region()
            if region is None or self._stopped.is_set():
                return None
            found = hashlib.sha256(region.view(chunk.segment_offset, chunk.size_bytes)).hexdigest()
            del region
            size_bytes += chunk.size_bytes
            if found != chunk.digest:
                forged = chunk
                break
            job.segment.checked.add(chunk.index)
        seconds = (time.monotonic_ns() - job.requested_ns) / 1e9
        return CheckedDigests(size_bytes=size_bytes, seconds=seconds, forged=forged)


def forgery_error(checkpoint: CheckpointId, chunk: ChunkRange) -> ChecksumMismatch:
    """The error of workers that have a forged chunk."""
    end = chunk.object_offset + chunk.size_bytes
    return ChecksumMismatch(
        f"chunk {chunk.index} of {checkpoint[:12]} ({chunk.object} bytes {chunk.object_offset:,} to {end:,}) is not "
        f"the one that was published: its SHA-256 is not {chunk.digest[:12]}…, though its checksum is right",
        hint="somebody has written to the store: see who can; an admin removes the part with `fs weights verify "
        f"{checkpoint[:12]} --repair`, then push the same weights again",
    )
