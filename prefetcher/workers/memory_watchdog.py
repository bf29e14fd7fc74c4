"""Memory limits without control groups: polls each worker's private memory and kills those above their limit.

Weaker than a control group: an allocation is noticed up to `INTERVAL_S` late. Only memory that the worker alone has
counts: neither its segment, which it cannot write, nor what it shares with the fork server, which is not private.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ..concurrency.threads import in_thread
from ..processes.forked_process import ForkedProcess
from ..processes.process_memory import private_bytes
from .worker import Worker

INTERVAL_S = 0.25


async def watch(workers: Callable[[], Sequence[Worker]]) -> None:
    """Enforces the limits of all workers without a control group, until cancelled."""
    while True:
        await _enforce([(worker, process) for worker in workers() if (process := _watched(worker)) is not None])
        await asyncio.sleep(INTERVAL_S)


def _watched(worker: Worker) -> ForkedProcess | None:
    process = worker.process.forked
    return process if process is not None and process.group is None and process.pid else None


async def _enforce(watched: Sequence[tuple[Worker, ForkedProcess]]) -> None:
    """Kills those that are above their limits. What a function has mapped decides how long it takes to look."""
    if not watched:
        return
    used_bytes = await in_thread(lambda: [private_bytes(process.pid) for _, process in watched], "memory-watchdog")
    for (worker, process), found_bytes in zip(watched, used_bytes, strict=True):
        limit_bytes = worker.resources.limit_bytes or worker.order.spec.memory_bytes
        if found_bytes > limit_bytes and not process.exited.is_set():
            worker.process.killed_for_memory = True
            process.kill()
