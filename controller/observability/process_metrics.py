"""Metrics of this process: event loop lag, CPU and memory, unwritten ledger rows."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Callable
from importlib.metadata import version as installed_version
from pathlib import Path

from ..state.redis_server.memory_watch import MemoryWatch
from .prometheus import Histogram, MetricFamily

EVERY_S = 0.1
LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class LoopLag:
    """Event loop lag: the delay of a timer, which each call has at each of its steps."""

    def __init__(self) -> None:
        self._seen = Histogram(LAG_S)

    async def run(self) -> None:
        while True:
            due_s = time.monotonic() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self._seen.observe(max(0.0, time.monotonic() - due_s))

    def family(self) -> MetricFamily:
        family = MetricFamily("fleetstart_event_loop_lag_seconds", "histogram", "Lag of the controller's event loop.")
        family.add_histogram(self._seen)
        return family


class ProcessMetrics:
    """Metrics of the controller's process.

    `unwritten` counts ledger rows that wait for Redis; `leads` is true if this controller schedules.
    """

    def __init__(
        self,
        *,
        unwritten: Callable[[], int],
        leads: Callable[[], bool],
        redis: Callable[[], str],
        memory: MemoryWatch,
    ) -> None:
        self._unwritten = unwritten
        self._leads = leads
        self._redis = redis
        self._memory = memory
        self._begun_s = _begun_s()
        self._version = installed_version("fleetstart")

    def families(self) -> list[MetricFamily]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        build = MetricFamily("fleetstart_build_info", "gauge", "Always 1.")
        build.add(1, version=self._version)
        return [
            build,
            *self._redis_memory(),
            _one("fleetstart_redis_up", "Whether Redis answered when it was last asked.", self._redis() == "ok"),
            _one("fleetstart_scheduler_leader", "Whether this controller schedules.", self._leads()),
            _one("fleetstart_ledger_unwritten_rows", "Rows that wait for Redis.", self._unwritten()),
            _one("process_start_time_seconds", "Unix time at which the process began.", self._begun_s),
            _one("process_cpu_seconds_total", "CPU time.", usage.ru_utime + usage.ru_stime, counter=True),
            _one("process_resident_memory_bytes", "Resident memory.", _resident_bytes()),
            _one("process_open_fds", "Open descriptors.", len(os.listdir("/proc/self/fd"))),
            _one("process_max_fds", "Limit of open descriptors.", resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        ]

    def _redis_memory(self) -> list[MetricFamily]:
        facts = self._memory.facts
        if facts is None:
            return []
        families = MetricFamily("fleetstart_redis_family_bytes", "gauge", "Memory of Redis by family of keys.")
        for name, size_bytes in sorted(self._memory.families.items()):
            families.add(size_bytes, family=name)
        return [
            _one("fleetstart_redis_memory_bytes", "Memory that Redis uses.", facts.used_bytes),
            _one("fleetstart_redis_memory_limit_bytes", "Memory that Redis may use.", facts.limit_bytes),
            _one("fleetstart_redis_problems", "Problems of Redis that `fs status` names.", len(self._memory.problems)),
            families,
        ]


def _one(name: str, text: str, value: float, *, counter: bool = False) -> MetricFamily:
    family = MetricFamily(name, "counter" if counter else "gauge", text)
    family.add(value)
    return family


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _begun_s() -> float:
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    boot_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot_s + ticks / TICKS_PER_S
