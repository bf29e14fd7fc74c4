"""Shares a project's quota of workers and memory among its versions. Pure: demands and quotas in, numbers out.

What counts is what may run: live versions, aliases, splits, numbered and old ones together, and workers that drain
still count as long as they run. So a quota holds whatever changes traffic. Within it, a version whose calls wait goes
before idle workers that others keep, and each version with calls has one worker before any has two. A pipeline counts
as the workers that it becomes; shells do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fleetstart.runtime.contract.errors import ErrorInfo, QuotaExceeded
from fleetstart.runtime.contract.sizes import GIB

from ...state.access_records import Quotas
from ...state.records import VersionKey


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDemand:
    """The workers that one version has and wants."""

    key: VersionKey
    running: int
    """Workers that are to run on, ready or starting."""
    needed: int
    """Workers for the calls that wait or run, or for the trial of a rollout."""
    desired: int
    """Workers with those that are kept: by `min`, or for a while after the last call."""
    memory_bytes: int
    """Memory of one worker."""


@dataclass(slots=True, kw_only=True)
class QuotaRoom:
    """The rest of a project's quotas of workers and memory; None is no limit."""

    workers: int | None
    memory_bytes: int | None

    @staticmethod
    def of(quotas: Quotas) -> QuotaRoom:
        return QuotaRoom(workers=quotas.workers, memory_bytes=quotas.memory_bytes)

    def fits(self, count: int, memory_bytes: int) -> int:
        """How many of `count` workers fit."""
        if self.workers is not None:
            count = min(count, self.workers)
        if self.memory_bytes is not None:
            count = min(count, self.memory_bytes // max(1, memory_bytes))
        return max(0, count)

    def take(self, count: int, memory_bytes: int) -> None:
        """Takes room for workers, also beyond the quota: what runs already counts."""
        if self.workers is not None:
            self.workers -= count
        if self.memory_bytes is not None:
            self.memory_bytes -= count * memory_bytes


LEVELS: tuple[Callable[[VersionDemand], int], ...] = (
    lambda one: min(one.running, one.needed, 1),
    lambda one: min(one.needed, 1),
    lambda one: min(one.running, one.needed),
    lambda one: one.needed,
    lambda one: min(one.running, one.desired),
    lambda one: one.desired,
)
"""Workers that a version is granted before any version gets those of the next level. Calls that run are not pushed
aside by those that wait, except that the first worker of a version goes before the second of another."""


def share_quota(demands: Sequence[VersionDemand], quotas: Quotas) -> dict[VersionKey, int]:
    """How many of its desired workers each version may have. Within a level, earlier demands go first."""
    room = QuotaRoom.of(quotas)
    granted = {one.key: 0 for one in demands}
    for level in LEVELS:
        for one in demands:
            missing = min(level(one), one.desired) - granted[one.key]
            count = room.fits(missing, one.memory_bytes) if missing > 0 else 0
            room.take(count, one.memory_bytes)
            granted[one.key] += count
    return granted


def has_worker_quotas(quotas: Quotas) -> bool:
    return quotas.workers is not None or quotas.memory_bytes is not None


def quota_reached(project: str, quotas: Quotas, key: VersionKey) -> ErrorInfo:
    """The error of a version that gets no worker, because others of its project have all that the quota allows."""
    limits = [f"{quotas.workers} workers"] if quotas.workers is not None else []
    limits += [f"{quotas.memory_bytes / GIB:.4g} GiB of memory"] if quotas.memory_bytes is not None else []
    return QuotaExceeded(
        f"{key} gets no worker: project {project} may run {' and '.join(limits)}, and its other versions use all of it",
        hint=f"an admin raises it: fs project quota {project}; or let them have less: fs scale NAME --max",
    ).info()
