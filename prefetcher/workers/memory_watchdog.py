"""Memory limits without control groups: polls each worker's private memory and kills those above their limit.

Weaker than a control group: an allocation is noticed up to `INTERVAL_S` late. Only memory that the worker alone has
counts: neither its segment, which it cannot write, nor what it shares with the fork server, which is not private.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ..processes.process_memory import private_bytes
from .worker import Worker

INTERVAL_S = 0.25


async def watch(workers: Callable[[], Sequence[Worker]]) -> None:
    """Enforces the limits of all workers without a control group, until cancelled."""
    while True:
        for worker in workers():
            process = worker.process.forked
            if process is None or process.group is not None or not process.pid:
                continue
            if private_bytes(process.pid) > (worker.resources.limit_bytes or worker.order.spec.memory_bytes):
                worker.process.killed_for_memory = True
                process.kill()
        await asyncio.sleep(INTERVAL_S)
