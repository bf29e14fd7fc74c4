"""Segments as the server's threads have them: pinned on the event loop, read in the threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from typing import Any, TypeVar

from fleetstart import native
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId

from ..segments.segment import Segment
from ..segments.store import SegmentStore

Result = TypeVar("Result")

LOOP_S = 5.0
"""Longest wait for the event loop, beside what it is asked to wait for."""
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Held:
    """A pinned segment. Who has it drops it with its pin: it keeps the memory."""

    segment: Segment
    region: native.Region
    control: native.ControlBlock
    slab_bytes: int
    chunk_bytes: int
    granted: tuple[int, ...]
    """Slabs that it has."""


class _Handover:
    """A hand-over of a pin: its reader has it, or, if that has given up, whoever pinned it takes it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: Held | None = None
        self._over = False

    def give(self, held: Held) -> bool:
        """False if the reader has given up."""
        with self._lock:
            if not self._over:
                self._held = held
            return not self._over

    def take(self) -> Held | None:
        """What was given by now; nothing can be given any more."""
        with self._lock:
            self._over = True
            return self._held


class Holdings:
    """Pins of readers. Called from threads; made on the event loop."""

    def __init__(self, segments: SegmentStore) -> None:
        self._segments = segments
        self._loop = asyncio.get_running_loop()

    def ask(self, work: Coroutine[Any, Any, Result], most_s: float = 0.0) -> Result | None:
        """The result of a coroutine on the event loop; None if the loop has ended, or is late."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # closed
            work.close()
            return None
        try:
            return future.result(most_s + LOOP_S)
        except (Late, asyncio.CancelledError):
            future.cancel()
            return None

    def pin(self, checkpoint: CheckpointId, reader: WorkerId, wait_s: float) -> Held | None:
        """The checkpoint's segment; None if it has not come into memory in time."""
        handover = _Handover()
        self.ask(self._pin(checkpoint, reader, wait_s, handover), wait_s)
        return handover.take()

    def unpin(self, held: Held, reader: WorkerId) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._segments.release, held.segment, reader)

    async def _pin(self, checkpoint: CheckpointId, reader: WorkerId, wait_s: float, handover: _Handover) -> None:
        until_s = time.monotonic() + wait_s
        while (segment := self._segments.pin(checkpoint, reader)) is None:
            if time.monotonic() >= until_s:
                return
            await asyncio.sleep(LOOK_S)
        assert segment.region is not None
        assert segment.control is not None
        assert segment.manifest is not None
        held = Held(
            segment,
            segment.region,
            segment.control,
            self._segments.budget.memory.slab_bytes,
            segment.manifest.chunk_bytes,
            tuple(segment.granted),
        )
        if not handover.give(held):
            self._segments.release(segment, reader)
