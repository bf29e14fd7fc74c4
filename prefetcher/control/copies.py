"""Copies: checkpoints that this node holds in host memory as its orders say, whether a worker uses them or not.

`changes` decides, `CopyKeeper` fetches and pins. A copy for which there is no memory, or whose fetch failed, is tried
again for as long as its order stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from fleetstart.runtime.contract.node.peers import CopyOrder
from fleetstart.runtime.contract.process.tasks import end_tasks, wait_at_most

from ..segments.feeds import Feed
from ..segments.store import Segment, SegmentStore
from .outbox import retries
from .redis_state import REDIS_ERRORS, NodeState

log = logging.getLogger(__name__)

REREAD_S = 1.0
LOOK_S = 0.5
"""Interval at which a copy in memory is looked at: its check of digests may fail it."""
AGAIN_S, AGAIN_MOST_S = 1.0, 30.0
"""Pauses after a failure, which grow: memory comes free with other workers' ends."""


@dataclass(frozen=True, slots=True)
class CopyChanges:
    """What to do about copies."""

    begin: list[CopyOrder] = field(default_factory=list)
    update: list[CopyOrder] = field(default_factory=list)
    end: list[CheckpointId] = field(default_factory=list)


def changes(
    orders: Mapping[CheckpointId, CopyOrder], held: Mapping[CheckpointId, CopyOrder], epoch: str
) -> CopyChanges:
    """Compares orders with what is held. Orders of another epoch were for a daemon that is gone."""
    own = {checkpoint: order for checkpoint, order in orders.items() if order.epoch == epoch}
    return CopyChanges(
        begin=[order for checkpoint, order in own.items() if checkpoint not in held],
        update=[
            order
            for checkpoint, order in own.items()
            if checkpoint in held and order.ordered_unix_ns > held[checkpoint].ordered_unix_ns
        ],
        end=[checkpoint for checkpoint in held if checkpoint not in own],
    )


class CopyKeeper:
    """Holds copies. Used on the event loop."""

    def __init__(self, *, state: NodeState, epoch: str, segments: SegmentStore) -> None:
        self._state = state
        self._epoch = epoch
        self._segments = segments
        self._held: dict[CheckpointId, CopyOrder] = {}
        self._tasks: dict[CheckpointId, asyncio.Task[None]] = {}
        self._pinned: dict[CheckpointId, Segment] = {}
        self._reread = asyncio.Event()

    async def listen(self) -> None:
        """Reads the orders whenever one was published, until cancelled."""
        async for _ in retries("listening for copies"):
            with contextlib.suppress(*REDIS_ERRORS):
                async for _ in self._state.copy_events():
                    self._reread.set()

    async def read(self) -> None:
        """Reads all orders once a second and acts on them, until cancelled; then gives up all copies."""
        try:
            while True:
                with contextlib.suppress(*REDIS_ERRORS):
                    self._apply(await self._state.read_copies())
                await wait_at_most(self._reread, REREAD_S)
                self._reread.clear()
        finally:
            await end_tasks(list(self._tasks.values()))

    def _apply(self, orders: Mapping[CheckpointId, CopyOrder]) -> None:
        found = changes(orders, self._held, self._epoch)
        for checkpoint in found.end:
            del self._held[checkpoint]
            self._tasks.pop(checkpoint).cancel()
            log.info("copy given back", extra={"checkpoint": checkpoint})
        for order in found.update:
            self._held[order.checkpoint] = order
            if (segment := self._pinned.get(order.checkpoint)) is not None:
                self._segments.feed(segment, Feed(order.peers, order.pulls))
        for order in found.begin:
            self._held[order.checkpoint] = order
            name = f"copy-{order.checkpoint[:8]}"
            self._tasks[order.checkpoint] = asyncio.create_task(self._hold(order.checkpoint), name=name)

    async def _hold(self, checkpoint: CheckpointId) -> None:
        """Fetches and pins a checkpoint until cancelled."""
        pin, pause_s = WorkerId(f"copy-{checkpoint}"), AGAIN_S
        while True:
            order = self._held[checkpoint]
            try:
                segment = await self._segments.acquire(checkpoint, pin, None, Feed(order.peers, order.pulls))
            except FleetError as error:
                log.warning("a copy cannot be held", extra={"checkpoint": checkpoint, "error": error.message})
            else:
                if await self._keep(checkpoint, segment, pin):
                    pause_s = AGAIN_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, AGAIN_MOST_S)

    async def _keep(self, checkpoint: CheckpointId, segment: Segment, pin: WorkerId) -> bool:
        """Returns when the segment has failed; True if it was whole before."""
        self._pinned[checkpoint] = segment
        try:
            await segment.filled.wait()
            was_whole = segment.error is None
            while segment.error is None:
                await asyncio.sleep(LOOK_S)
            log.warning("a copy was lost", extra={"checkpoint": checkpoint, "error": segment.error.message})
            return was_whole
        finally:
            self._pinned.pop(checkpoint, None)
            self._segments.release(segment, pin)
