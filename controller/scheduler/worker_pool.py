"""The state machine of one version's workers: existing and desired workers in, decisions out. Pure.

    wanted   state reported by the node

    run      (none) ──> starting ──> ready     draining: its node shuts down
                └──────────┴───────────┴───────────┴──> gone | failed ──> order deleted
     │ surplus, or not ready in time
     v
    drain    (none)     starting     ready ──> draining
                └──────────┴───────────┴───────────┴──> gone | failed ──> order deleted
                                                   └──> drain timed out ─> order deleted: its node kills it

A surplus worker of a language model may stand by first, without weights and calls: it is woken before a worker is
started, and drained after its time.

A worker whose node died or was restarted (`lost`) counts as ended in every state. Each other pair is impossible: the
order is deleted, the worker is replaced, and its story is logged.

No state is kept: members follow from orders and statuses, failed starts from their record, so a new scheduler decides
as the old one would have. Starts back off after failures; after three in a row the version is *broken* (an open circuit
breaker), and its callers get the start's own error, until a minute has passed and a call comes (half-open), or it is
deployed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from fleetstart.runtime.contract.errors import DeviceOutOfMemory, ErrorInfo, StartFailed, WorkerLost, error_from
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.orders import WorkerState

from ..state.records import Failure

FAILURES_TO_BREAK = 3
BACKOFF_FIRST_MS = 500
BACKOFF_LONGEST_MS = 30_000
HALF_OPEN_MS = 60_000
"""Time until a broken version is tried again: long enough to cost next to nothing, short enough to notice a fix."""
CLOCKS_APART_MS = 5_000
"""By which the clocks of two controllers may differ."""
START_SLACK_MS = 5_000
"""Grace beyond the start timeout: the node ends a late start itself, with a better error."""
DRAIN_SLACK_MS = 60_000

Phase = Literal["starting", "serving", "standby", "draining", "ended"]
PHASES: dict[tuple[str, str | None], Phase] = {
    ("run", None): "starting",
    ("run", "starting"): "starting",
    ("run", "ready"): "serving",
    ("run", "standby"): "starting",  # it is woken
    ("run", "draining"): "serving",  # its node shuts down; it counts until it has ended
    ("run", "gone"): "ended",
    ("run", "failed"): "ended",
    ("standby", None): "standby",
    ("standby", "starting"): "standby",
    ("standby", "ready"): "standby",
    ("standby", "standby"): "standby",
    ("standby", "draining"): "draining",  # its node shuts down
    ("standby", "gone"): "ended",
    ("standby", "failed"): "ended",
    ("drain", None): "draining",
    ("drain", "starting"): "draining",
    ("drain", "ready"): "draining",
    ("drain", "standby"): "draining",
    ("drain", "draining"): "draining",
    ("drain", "gone"): "ended",
    ("drain", "failed"): "ended",
}
"""Phase of a worker by the wanted and the reported state. A pair that is not listed is impossible."""


class ImpossibleWorkerState(Exception):
    """A worker's wanted and reported state contradict each other. The message is the worker's story."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An ordered worker of the version."""

    worker: WorkerId
    wanted: Literal["run", "standby", "drain"]
    ordered_unix_ms: int
    """Time of its order by the clock of the day, which may step: for people, and for the order among workers."""
    age_ms: int = 0
    """Time since this scheduler first saw its order, by a clock that does not step: deadlines are counted by it."""
    state: WorkerState | None = None
    """State by its status; None until its node has answered the order."""
    lost: bool = False
    """True if its node died, or was restarted since."""
    served: bool = False
    """True if it was ever ready: then its end is no failed start."""
    reported_unix_ms: int = 0
    """Time of its last status; 0 without one."""
    ready_unix_ms: int = 0
    running: int = 0
    error: ErrorInfo | None = None
    helper: bool = False
    """True if it is a helper stage of another member: its end is handled with that member, and it is not counted unless
    it becomes a whole worker."""
    becomes_whole: bool = False
    """True if a helper stage is to become a whole worker."""
    staged: bool = False
    """True if it was started as a stage of a pipeline: others have parts of its weights, and it cannot stand by."""

    @property
    def phase(self) -> Phase:
        """Errors: ImpossibleWorkerState if its wanted and reported state contradict each other."""
        if self.lost:
            return "ended"
        phase = PHASES.get((self.wanted, self.state))
        if phase is None:
            raise ImpossibleWorkerState(self.story())
        return phase

    def story(self) -> str:
        """What was ordered and reported of the worker, and when, for logs and errors."""
        parts = [f"worker {self.worker}", f"ordered to {self.wanted} at {_time(self.ordered_unix_ms)}"]
        if self.state is None:
            parts.append("no status")
        else:
            at = f" at {_time(self.reported_unix_ms)}" if self.reported_unix_ms else ""
            parts.append(f"reported {self.state}{at}")
        parts.append("was ready before" if self.served else "never ready")
        parts.append(f"{self.running} calls")
        if self.helper:
            parts.append("helper stage")
        if self.error is not None:
            parts.append(f"error {self.error.code}: {self.error.message}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Changes to the version's orders."""

    start: int = 0
    wake: tuple[WorkerId, ...] = ()
    """Workers in standby that are wanted again."""
    stand_by: tuple[WorkerId, ...] = ()
    drain: tuple[WorkerId, ...] = ()
    delete_orders: tuple[WorkerId, ...] = ()
    """Workers that have ended, or that their nodes must kill."""
    impossible: tuple[str, ...] = ()
    """Stories of workers in an impossible state, to be logged."""
    failure: Failure | None = None
    """Record of a failed start, to be written."""
    clear_failure: bool = False
    again_unix_ms: int | None = None
    """End of the backoff, when the version must be decided again."""


def broken(failure: Failure | None, now_unix_ms: int) -> bool:
    """True if the version is broken, so that no start is tried."""
    if failure is None or failure.count < FAILURES_TO_BREAK:
        return False
    return elapsed_ms(failure, now_unix_ms) < HALF_OPEN_MS


def elapsed_ms(failure: Failure, now_unix_ms: int) -> int:
    """Time since the last failed start. One that lies ahead is of before a clock stepped back: that is over."""
    since_ms = now_unix_ms - failure.last_unix_ms
    return since_ms if since_ms > -CLOCKS_APART_MS else HALF_OPEN_MS


def backoff_ms(count: int) -> int:
    """Delay after `count` failed starts in a row."""
    return int(min(BACKOFF_FIRST_MS * 2 ** min(count - 1, 16), BACKOFF_LONGEST_MS))


def failure_after(failure: Failure | None, error: ErrorInfo, now_unix_ms: int) -> Failure:
    """The record after another failed start. Errors of the deploy (4xx) are not retried: they would fail again. One for
    want of device memory breaks nothing.
    """
    count = (failure.count if failure else 0) + 1
    if error.code == DeviceOutOfMemory.code:  # the next worker gets more memory, until no device has that much
        count = max(1, count - 1)
    if error_from(error).status < 500:
        count = max(count, FAILURES_TO_BREAK)
    return Failure(count=count, last_unix_ms=now_unix_ms, error=error)


def decide(
    *,
    spec: FunctionSpec,
    desired: int,
    members: Sequence[Member],
    failure: Failure | None,
    now_unix_ms: int,
    standby_s: float = 0.0,
) -> Decision:
    """`standby_s`: how long a surplus worker of the version stands by before it is drained; 0: not at all."""
    members, impossible = _without_impossible(members)
    ended = {m.worker for m in members if m.phase == "ended"}
    start_timed_out = {m.worker for m in members if _start_timed_out(m, spec)}
    drain_timed_out = {m.worker for m in members if _drain_timed_out(m, spec)}

    known = failure
    for member in members:
        error = _start_error(member, spec, member.worker in start_timed_out)
        if error is not None and not member.helper:
            failure = failure_after(failure, error, now_unix_ms)
    running = [m for m in members if m.phase in ("starting", "serving") and m.worker not in start_timed_out]
    alive = [m for m in running if not m.helper]
    recovered = (
        failure is known
        and failure is not None
        and any(m.state == "ready" and m.ready_unix_ms > failure.last_unix_ms for m in alive)
    )
    if recovered:
        failure = None

    becoming_whole = sum(m.helper and m.becomes_whole for m in running)
    missing = desired - len(alive) - becoming_whole
    waiting = _by_age(m for m in members if m.phase == "standby")
    wake = waiting[: max(0, missing)]
    over = [m for m in waiting[len(wake) :] if m.age_ms >= standby_s * 1000]
    surplus = _surplus(alive, len(alive) - desired)
    stand_by = [m for m in surplus if standby_s and m.state == "ready" and not m.staged]
    start, again_unix_ms = _starts(missing - len(wake), alive, failure, now_unix_ms)
    left = [m for m in waiting[len(wake) :] if m not in over]
    return Decision(
        start=start,
        wake=tuple(m.worker for m in wake),
        stand_by=tuple(m.worker for m in stand_by),
        drain=(*sorted(start_timed_out), *(m.worker for m in (*over, *surplus) if m not in stand_by)),
        delete_orders=tuple(sorted(ended | drain_timed_out | {m.worker for m in impossible})),
        impossible=tuple(m.story() for m in impossible),
        failure=failure if failure is not known and not recovered else None,
        clear_failure=recovered,
        again_unix_ms=min(
            [now_unix_ms + math.ceil(standby_s * 1000) - m.age_ms for m in left]
            + ([again_unix_ms] if again_unix_ms is not None else []),
            default=None,
        ),
    )


def _without_impossible(members: Sequence[Member]) -> tuple[list[Member], list[Member]]:
    """The members whose states are possible, and the others. One impossible worker must not stop the scheduler."""
    possible: list[Member] = []
    impossible: list[Member] = []
    for member in members:
        try:
            _ = member.phase
        except ImpossibleWorkerState:
            impossible.append(member)
        else:
            possible.append(member)
    return possible, impossible


def _starts(missing: int, alive: Sequence[Member], failure: Failure | None, now_unix_ms: int) -> tuple[int, int | None]:
    """The number of workers to order now, and when to decide again. After a failure one worker is tried first."""
    if missing <= 0:
        return 0, None
    if failure is None:
        return missing, None
    if broken(failure, now_unix_ms):
        return 0, failure.last_unix_ms + HALF_OPEN_MS
    wait_ms = backoff_ms(failure.count) - elapsed_ms(failure, now_unix_ms)
    if failure.count < FAILURES_TO_BREAK and wait_ms > 0:
        return 0, now_unix_ms + wait_ms
    if any(m.state != "ready" for m in alive):
        return 0, None
    return 1, None


def _surplus(alive: Sequence[Member], count: int) -> tuple[Member, ...]:
    """The workers to give up: not ready ones first, then idle ones, then the youngest."""
    if count <= 0:
        return ()
    order = sorted(alive, key=lambda m: (m.state == "ready", m.running, -m.ordered_unix_ms, m.worker))
    return tuple(order[:count])


def _by_age(members: Iterable[Member]) -> list[Member]:
    """Workers in standby in the order in which they are woken: the latest first, so that the others reach their end."""
    return sorted(members, key=lambda m: (m.age_ms, m.worker))


def _start_timed_out(member: Member, spec: FunctionSpec) -> bool:
    return member.phase == "starting" and member.age_ms > spec.start_timeout_s * 1000 + START_SLACK_MS


def _drain_timed_out(member: Member, spec: FunctionSpec) -> bool:
    """True if a draining worker has not ended long after its last call must have: deleting its order ends it."""
    return member.phase == "draining" and member.age_ms > spec.timeout_s * 1000 + DRAIN_SLACK_MS


def _start_error(member: Member, spec: FunctionSpec, timed_out: bool) -> ErrorInfo | None:
    """The error of a failed start, if it was one: not of a worker that was ready, or that was drained."""
    if timed_out:
        return StartFailed(
            f"function {spec.name}: no worker was ready {spec.start_timeout_s:g} s after its order",
            hint=f"raise start_timeout, or look into `fs logs {spec.name}`",
        ).info()
    if member.wanted != "run" or member.served or member.state != "failed":
        return None
    return member.error or WorkerLost(f"worker {member.worker} ended while it started").info()


def _time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds")
