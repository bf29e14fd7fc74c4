"""The writes of one step of the scheduler, which its loop carries out."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder

from ..peers.pool import PoolChanges
from ..planner.plan import Plan
from ..state.records import Failure, VersionKey
from .agenda import Rest


@dataclass(slots=True)
class Step:
    """The writes of one step, in this order."""

    failures: list[tuple[VersionKey, Failure | None]] = field(default_factory=list)
    """Records of failed starts; None clears the record."""
    orders: list[WorkerOrder] = field(default_factory=list)
    deleted_orders: list[WorkerOrder] = field(default_factory=list)
    pool: PoolChanges = field(default_factory=PoolChanges)
    """Changes of copies and of peer keys."""
    rests: dict[VersionKey, tuple[Rest, int | None]] = field(default_factory=dict)
    """What is expected of each version that was looked at, and the monotonic time at which it must be again."""
    impossible: list[str] = field(default_factory=list)
    """Stories of workers in an impossible state, to be logged."""
    unplaced: dict[VersionKey, ErrorInfo] = field(default_factory=dict)
    plans: dict[WorkerId, Plan] = field(default_factory=dict)
    """The plan of each new worker; the stages of a pipeline share one."""
    faults: dict[VersionKey, Exception] = field(default_factory=dict)
    """Versions that could not be decided about, to be logged."""
    again_unix_ms: int | None = None

    def add(self, other: Step) -> None:
        """Adds the writes of another step, which come after these."""
        for name in _WRITES:
            theirs = getattr(other, name)
            if theirs:
                ours = getattr(self, name)
                ours.update(theirs) if isinstance(ours, dict) else ours.extend(theirs)
        self.soonest(other.again_unix_ms)

    def soonest(self, unix_ms: int | None) -> None:
        if unix_ms is not None:
            self.again_unix_ms = min(unix_ms, self.again_unix_ms or unix_ms)


_WRITES = ("failures", "orders", "deleted_orders", "impossible", "unplaced", "plans", "faults", "rests")
"""The fields of a step that add up."""
