"""A worker's process: its events, its exit status, its termination."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.node import exit_codes

from ..processes.consumption import Consumption
from ..processes.exit_reasons import describe_status, exit_error
from ..processes.forked_process import ForkedProcess, ProcessEvent, ProcessExited
from ..processes.prefork_pool import PreforkPool

log = logging.getLogger(__name__)

EXIT_GRACE_S = 1.0
"""Time between the end of a worker's control socket, or its error, and the exit that should follow by itself."""
KILL_TIMEOUT_S = 5.0
"""Time between SIGKILL and the exit: a process inside a system call may take its time."""


class WorkerProcess:
    """The process of one worker; none until `attach`. A prefork process that turns out dead is terminated and
    another one attached."""

    def __init__(self, name: str, prefork_pool: PreforkPool, print_line: Callable[[str], None]) -> None:
        self.forked: ForkedProcess | None = None
        self.killed_for_memory = False
        """Set by the memory watchdog when it kills the process."""
        self._cpu_before_ns = 0
        """Processor time of a preforked process before it was taken, which is the node's own."""
        self.events: asyncio.Queue[ProcessEvent] = asyncio.Queue()
        self._name = name
        self._prefork_pool = prefork_pool
        self._print_line = print_line

    def attach(self, process: ForkedProcess) -> None:
        """Takes over a forked process. From now on `events` are its events, and those of an earlier process no
        longer count."""
        self.forked = process
        self._cpu_before_ns = (process.group.cpu_ns() or 0) if process.group is not None else 0
        self.events = asyncio.Queue()
        process.log.send_to(self._print_line)
        process.listen(self.events.put_nowait)

    async def terminate(self) -> None:
        """Kills the process, reads its last log lines and removes its control group. Does nothing without a process."""
        process = self.forked
        if process is None:
            return
        process.kill()
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await process.exited.wait()
        except TimeoutError:
            log.error("a killed worker has not ended", extra={"worker": self._name, "pid": process.pid})
        process.close()
        self._prefork_pool.remove_group(process.group)

    async def exit_status(self) -> int | None:
        """Waits briefly for an exit that should follow by itself, then kills the process."""
        assert self.forked is not None
        for timeout_s in (EXIT_GRACE_S, KILL_TIMEOUT_S):
            try:
                async with asyncio.timeout(timeout_s):
                    await self.forked.exited.wait()
                break
            except TimeoutError:
                self.forked.kill()
        while not self.events.empty():
            event = self.events.get_nowait()
            if isinstance(event, ProcessExited):
                return event.status
        return None

    def pids(self) -> set[int]:
        """Its processes: those in its control group, else its first alone."""
        if self.forked is None:
            return set()
        with contextlib.suppress(OSError):
            if self.forked.group is not None:
                return set(map(int, Path(self.forked.group.procs[0]).read_text().split()))
        return {self.forked.pid}

    def consumption(self) -> Consumption:
        """Processor time and memory since the process was taken; nothing without a control group."""
        group = self.forked.group if self.forked is not None else None
        if group is None:
            return Consumption()
        cpu_ns = group.cpu_ns()
        return Consumption(
            cpu_ns=None if cpu_ns is None else cpu_ns - self._cpu_before_ns,
            memory_peak_bytes=group.memory_peak_bytes(),
        )

    @property
    def ran_out_of_memory(self) -> bool:
        group = self.forked.group if self.forked is not None else None
        return self.killed_for_memory or (group is not None and group.oom_kills() > 0)

    def exit_error(self, status: int | None, *, limit_bytes: int, was_ready: bool) -> FleetError:
        """The error for a process that ended with this status without being told to."""
        oom = self.ran_out_of_memory
        log.info("worker ended", extra={"worker": self._name, "status": describe_status(status), "oom": oom})
        return exit_error(
            status, oom=oom, limit_bytes=limit_bytes, was_ready=was_ready, stuck_status=exit_codes.OVERRUN
        )
