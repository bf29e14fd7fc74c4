"""Project quotas of deploys, and rate limits. Pure functions of values and the time.

At a deploy or a scaling a function counts with its maximum: `scale.max` workers with their memory each, whether they
run or not. So what fits today cannot fail tomorrow for lack of its own project's quota. What runs, of all versions, is
held to the same quotas by the scheduler (`scheduler.quotas`). Calls per second are a token bucket of one
second's worth in each gateway, which has its share of the quota.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fleetstart.runtime.contract.errors import QuotaExceeded, RateLimited
from fleetstart.runtime.contract.process.token_bucket import take_token
from fleetstart.runtime.contract.sizes import GIB

from ..state.access_records import Quotas


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceDemand:
    """The most that one function may use of its project's quotas."""

    function: str
    workers: int
    memory_bytes: int
    """Memory of all these workers."""


def check_quotas(
    project: str,
    quotas: Quotas,
    others: Iterable[ResourceDemand],
    wanted: ResourceDemand,
    present: ResourceDemand | None = None,
) -> None:
    """Checks that a function's demand fits the project's quotas beside the demands of its other functions.

    `present` is the function's demand so far, which it keeps whatever the quota. Errors: QuotaExceeded.
    """
    rest = list(others)
    had = present or ResourceDemand(function=wanted.function, workers=0, memory_bytes=0)
    memory_bytes = sum(one.memory_bytes for one in rest)
    sums = (
        ("functions", quotas.functions, len(rest), 1, int(present is not None), str),
        ("workers", quotas.workers, sum(one.workers for one in rest), wanted.workers, had.workers, str),
        ("memory", quotas.memory_bytes, memory_bytes, wanted.memory_bytes, had.memory_bytes, _size),
    )
    for flag, limit, taken, more, has, shown in sums:
        if limit is not None and more > has and taken + more > limit:
            raise QuotaExceeded(
                f"project {project} may have {shown(limit)} {flag}: its other functions come to {shown(taken)}, "
                f"and {wanted.function} wants {shown(more)}" + ("" if flag == "functions" else " (scale.max counts)"),
                hint=f"an admin raises it: fs project quota {project} --{flag} {_raised(flag, taken + more)}"
                + ("" if flag == "functions" else f"; or let {wanted.function} have less: --max, --memory"),
            )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.4g} GiB of"


def _raised(flag: str, total: int) -> str:
    return f"{-(-total // (1 << 20))}MiB" if flag == "memory" else str(total)


class ProjectRateLimiter:
    """Rate limiter of one gateway: a token bucket a project."""

    def __init__(self) -> None:
        self._due_s: dict[str, float] = {}
        """When each project's next call is due (`take_token`)."""

    def take(self, project: str, calls_per_s: float, gateways: int, now_ns: int) -> None:
        """Takes one token. Errors: RateLimited, with the time until the next token."""
        rate = calls_per_s / max(1, gateways)
        due_s = self._due_s.get(project, 0.0)
        self._due_s[project], retry_after_s = take_token(due_s, per_s=rate, burst=rate, now_s=now_ns / 1e9)
        if retry_after_s:
            raise RateLimited(
                f"project {project} may make {calls_per_s:g} calls a second"
                + (f", {rate:g} of them through this gateway" if gateways > 1 else ""),
                hint=f"try again after Retry-After seconds; an admin raises it: "
                f"fs project quota {project} --calls-per-s {max(1, round(2 * calls_per_s))}",
                retry_after_s=retry_after_s,
            )
