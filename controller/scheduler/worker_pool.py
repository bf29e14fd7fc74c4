"""The state machine of one version's workers: existing and desired workers in, decisions out. Pure.

No state is kept: members follow from orders and statuses, failed starts from their record, so a new scheduler decides
as the old one would have. Starts back off after failures; after three in a row the version is *broken* (an open circuit
breaker), and its callers get the start's own error, until a minute has passed and a call comes (half-open), or it is
deployed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fleetstart.runtime.contract.errors import ErrorInfo, StartFailed, WorkerLost, error_from
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.orders import FINAL, WorkerState

from ..state.records import Failure

FAILURES_TO_BREAK = 3
BACKOFF_FIRST_MS = 500
BACKOFF_LONGEST_MS = 30_000
HALF_OPEN_MS = 60_000
"""Time until a broken version is tried again: long enough to cost next to nothing, short enough to notice a fix."""
START_SLACK_MS = 5_000
"""Grace beyond the start timeout: the node ends a late start itself, with a better error."""
DRAIN_SLACK_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An ordered worker of the version."""

    worker: WorkerId
    wanted: Literal["run", "drain"]
    ordered_unix_ms: int
    state: WorkerState | None = None
    """State by its status; None until its node has answered the order."""
    lost: bool = False
    """Whether its node died, or was restarted since."""
    served: bool = False
    """Whether it was ever ready: then its end is no failed start."""
    ready_unix_ms: int = 0
    running: int = 0
    error: ErrorInfo | None = None
    helper: bool = False
    """Whether it is a helper stage of another member: its end is handled with that member, and it is not counted unless
    it becomes a whole worker."""
    grows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Changes to the version's orders."""

    start: int = 0
    drain: tuple[WorkerId, ...] = ()
    take_back: tuple[WorkerId, ...] = ()
    failure: Failure | None = None
    """Record of a failed start, to be written."""
    clear_failure: bool = False
    again_unix_ms: int | None = None
    """End of the backoff, when the version must be decided again."""


def broken(failure: Failure | None, now_unix_ms: int) -> bool:
    """Whether the version is broken, so that no start is tried."""
    return (
        failure is not None and failure.count >= FAILURES_TO_BREAK and now_unix_ms < failure.last_unix_ms + HALF_OPEN_MS
    )


def backoff_ms(count: int) -> int:
    """Delay after `count` failed starts in a row."""
    return int(min(BACKOFF_FIRST_MS * 2 ** min(count - 1, 16), BACKOFF_LONGEST_MS))


def failure_after(failure: Failure | None, error: ErrorInfo, now_unix_ms: int) -> Failure:
    """The record after another failed start. Errors of the deploy (4xx) are not retried: they would fail again."""
    count = (failure.count if failure else 0) + 1
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
) -> Decision:
    over = {m.worker for m in members if m.lost or m.state in FINAL}
    late = {m.worker for m in members if m.worker not in over and _late(m, spec, now_unix_ms)}
    stuck = {m.worker for m in members if m.worker not in over and _stuck(m, spec, now_unix_ms)}

    known = failure
    for member in members:
        error = _start_error(member, spec, member.worker in late)
        if error is not None and not member.helper:
            failure = failure_after(failure, error, now_unix_ms)
    alive = [m for m in members if m.wanted == "run" and m.worker not in over | late and not m.helper]
    cured = (
        failure is known
        and failure is not None
        and any(m.state == "ready" and m.ready_unix_ms > failure.last_unix_ms for m in alive)
    )
    if cured:
        failure = None

    growing = sum(m.helper and m.grows and m.wanted == "run" and m.worker not in over | late for m in members)
    start, again_unix_ms = _starts(desired - len(alive) - growing, alive, failure, now_unix_ms)
    return Decision(
        start=start,
        drain=(*sorted(late), *_surplus(alive, len(alive) - desired)),
        take_back=tuple(sorted(over | stuck)),
        failure=failure if failure is not known and not cured else None,
        clear_failure=cured,
        again_unix_ms=again_unix_ms,
    )


def _starts(missing: int, alive: Sequence[Member], failure: Failure | None, now_unix_ms: int) -> tuple[int, int | None]:
    """The number of workers to order now, and when to decide again. After a failure one worker is tried first."""
    if missing <= 0:
        return 0, None
    if failure is None:
        return missing, None
    if broken(failure, now_unix_ms):
        return 0, failure.last_unix_ms + HALF_OPEN_MS
    due_unix_ms = failure.last_unix_ms + backoff_ms(failure.count)
    if failure.count < FAILURES_TO_BREAK and now_unix_ms < due_unix_ms:
        return 0, due_unix_ms
    if any(m.state != "ready" for m in alive):
        return 0, None
    return 1, None


def _surplus(alive: Sequence[Member], count: int) -> tuple[WorkerId, ...]:
    """The workers to drain: not ready ones first, then idle ones, then the youngest."""
    if count <= 0:
        return ()
    order = sorted(alive, key=lambda m: (m.state == "ready", m.running, -m.ordered_unix_ms, m.worker))
    return tuple(m.worker for m in order[:count])


def _late(member: Member, spec: FunctionSpec, now_unix_ms: int) -> bool:
    limit_ms = spec.start_timeout_s * 1000 + START_SLACK_MS
    starting = member.wanted == "run" and member.state in (None, "starting")
    return starting and now_unix_ms - member.ordered_unix_ms > limit_ms


def _stuck(member: Member, spec: FunctionSpec, now_unix_ms: int) -> bool:
    """Whether a draining worker has not ended long after its last call must have: deleting its order ends it."""
    limit_ms = spec.timeout_s * 1000 + DRAIN_SLACK_MS
    return member.wanted == "drain" and now_unix_ms - member.ordered_unix_ms > limit_ms


def _start_error(member: Member, spec: FunctionSpec, late: bool) -> ErrorInfo | None:
    """The error of a failed start, if it was one: not of a worker that was ready, or that was drained."""
    if late:
        return StartFailed(
            f"function {spec.name}: no worker was ready {spec.start_timeout_s:g} s after its order",
            hint=f"raise start_timeout, or look into `fs logs {spec.name}`",
        ).info()
    if member.wanted != "run" or member.served or member.state != "failed":
        return None
    return member.error or WorkerLost(f"worker {member.worker} ended while it started").info()
