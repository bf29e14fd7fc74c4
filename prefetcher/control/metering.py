"""Metering of this node's workers: what each has used so far goes to the ledger, at the rates that Redis has."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable

from ..concurrency.threads import in_thread
from ..workers.meter import FLUSH_S
from ..workers.worker import Worker
from .outbox import retries
from .redis_state import REDIS_ERRORS, NodeState

RATES_S = 1.0


class Metering:
    """The loops that write workers' time and keep their rates. `workers`: those that have not ended."""

    def __init__(
        self,
        state: NodeState,
        workers: Callable[[], Iterable[Worker]],
        device_memory: Callable[[], dict[int, int]] | None = None,
    ) -> None:
        """`device_memory`: memory of GPUs that each process has, asked in a thread; None where there are no GPUs."""
        self._state = state
        self._workers = workers
        self._device_memory = device_memory

    async def flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            if self._device_memory is not None:
                used_bytes = await in_thread(self._device_memory, "device-memory")
                for worker in self._workers():
                    worker.note_devices(used_bytes)
            for worker in self._workers():
                worker.record.flush()

    async def refresh_rates(self) -> None:
        async for _ in retries("reading rates"):
            with contextlib.suppress(*REDIS_ERRORS):
                while True:
                    sheet, kept = await self._state.read_rates(time.time_ns() // 1_000_000)
                    for worker in self._workers():
                        worker.record.set_rate(sheet, kept=worker.order.worker in kept)
                    await asyncio.sleep(RATES_S)
