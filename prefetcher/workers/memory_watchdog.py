"""Memory limits without control groups: polls each worker's private memory and kills those above their limit.

Weaker than a control group: an allocation is noticed up to `INTERVAL_S` late. Only memory that the worker alone has
counts: neither its segment, which is not anonymous, nor what it shares with the fork server, which is not private.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from .worker import Worker

INTERVAL_S = 0.25


async def watch(workers: Callable[[], Sequence[Worker]]) -> None:
    """Enforces the limits of all workers without a control group, until cancelled."""
    while True:
        for worker in workers():
            process = worker.process.forked
            if process is None or process.group is not None or not process.pid:
                continue
            if private_bytes(process.pid) > worker.order.spec.memory_bytes:
                worker.process.killed_for_memory = True
                process.kill()
        await asyncio.sleep(INTERVAL_S)


def private_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Private memory of a process and its descendants; 0 if it is gone."""
    return sum(_of_one(process, proc) for process in _with_descendants(pid, proc))


def _of_one(pid: int, proc: Path) -> int:
    try:
        text = (proc / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return 0
    kib = {words[0]: int(words[1]) for line in text.splitlines() if len(words := line.split()) == 3}
    return 1024 * (min(kib.get("Private_Dirty:", 0), kib.get("Anonymous:", 0)) + kib.get("Swap:", 0))


def _with_descendants(pid: int, proc: Path) -> list[int]:
    found = [pid]
    for process in found:  # grows while it is walked
        for listing in (proc / str(process) / "task").glob("*/children"):
            try:
                found.extend(int(child) for child in listing.read_text().split())
            except OSError:
                continue
    return found
