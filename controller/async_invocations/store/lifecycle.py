"""State machine of an async invocation: pure transitions, values and `now` in, the next `Progress` out.

Queued until a gateway claims it; running under that gateway's lease; ended once. A run that the platform lost
(a worker or a gateway that died) is made again after a while, at most `LOSSES_MAX` times, and is a dead letter then. A
run that no worker took, as the queue was full, no node had room, or none was ready in time, counts for nothing: the
call waits as long as it may. What the handler answers, errors included, is the answer, and ends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from fleetstart.runtime.contract.billing.ledger import InvocationRow
from fleetstart.runtime.contract.errors import (
    DeadlineExceeded,
    ErrorInfo,
    QueueFull,
    StoreFailed,
    Unavailable,
    WorkerLost,
)

from ...state.invocation_records import (
    MOMENTS_MAX,
    Answer,
    Delivery,
    Envelope,
    HistoryEvent,
    Progress,
    ReportedProgress,
    RunsBill,
    Status,
)

LEASE_MS = 4_000
"""Lease of a claim; without a renewal its gateway counts as dead. Longer than a busy machine stalls a process."""
UNCHANGED_MS = 1_500
"""Time for which an expired lease must not have been renewed before it is taken over: longer than the interval of
renewals, so that a clock that steps forward ends no run of a gateway that lives."""
LOSSES_MAX = 4
BACKOFF_MS = 500
BACKOFF_MAX_MS = 30_000
DELIVERIES_MAX = 12
"""Attempts of a webhook, after 1 s, 2 s, 4 s and so on: the last one after somewhat more than half an hour."""
DELIVERY_BACKOFF_MS = 1_000
DELIVERY_BACKOFF_MAX_MS = 900_000
DELIVERY_LEASE_MS = 30_000
"""Lease of a delivery: longer than one attempt may take."""
UNDELIVERED_MS = 3_600_000
"""Time for which an invocation is kept beyond the next attempt of its webhook, whatever its time to live: the attempt
may be late, as where all controllers are away for a while."""
LOST = frozenset((WorkerLost.code, Unavailable.code, StoreFailed.code))
"""Error codes of the platform after which the same call may succeed."""
NO_ROOM = frozenset((QueueFull.code, "rate_limited", "overloaded", "queue_timeout"))
"""Error codes of rejections for lack of capacity: nothing was run."""
UNSENT = frozenset((Unavailable.code, DeadlineExceeded.code))
"""Error codes that say the same of a run that was sent to no worker: no node has room, or no worker was ready within
the function's `timeout_s`."""
SAFETY_S = 86_400
"""Maximum run time of a function: until then an invocation that has not ended is not swept."""

Step = Literal["claim", "expire", "cancel", "deliver"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """Outcome of one execution. Without an answer and an error it was cancelled."""

    answer: Answer | None = None
    error: ErrorInfo | None = None
    """Error of the platform or of the handler; None for a response whose meaning only the handler knows."""
    sent: bool = True
    """The call was sent to a worker, which may have run it."""
    row: InvocationRow | None = None
    """The run's row in the ledger; None if it has none, or its gateway died."""


def accepted(envelope: Envelope) -> Progress:
    at_unix_ms = envelope.accepted_unix_ms
    return Progress(
        due_unix_ms=at_unix_ms,
        queue_until_unix_ms=at_unix_ms + envelope.queue_s * 1000,
        moments=[HistoryEvent(unix_ms=at_unix_ms, what="accepted")],
    )


def next_step(progress: Progress, now_unix_ms: int) -> Step | None:
    """The step that is due now; None if none is."""
    if progress.status == "queued":
        if progress.cancelling:
            return "cancel"
        if now_unix_ms >= progress.queue_until_unix_ms:
            return "expire"
        return "claim" if now_unix_ms >= progress.due_unix_ms else None
    if progress.status == "running":
        if now_unix_ms < progress.due_unix_ms:
            return None
        return "cancel" if progress.cancelling else "claim"
    delivery = progress.delivery
    if delivery is not None and delivery.state == "pending" and now_unix_ms >= delivery.next_unix_ms:
        return "deliver"
    return None


def due_unix_ms(progress: Progress) -> int | None:
    """Time at which its run is due; None if it has ended."""
    return None if progress.ended else progress.due_unix_ms


def timer_unix_ms(progress: Progress) -> int | None:
    """Time at which it is due regardless of capacity: its queue timeout, or the next attempt of its webhook."""
    if progress.status == "queued":
        return progress.queue_until_unix_ms
    delivery = progress.delivery
    return delivery.next_unix_ms if progress.ended and delivery is not None and delivery.state == "pending" else None


def kept_until_unix_ms(progress: Progress, envelope: Envelope) -> int:
    begun_unix_ms = progress.finished_unix_ms if progress.ended else progress.queue_until_unix_ms + SAFETY_S * 1000
    kept_unix_ms = begun_unix_ms + envelope.ttl_s * 1000
    delivery = progress.delivery
    if progress.ended and delivery is not None and delivery.state == "pending":
        return max(kept_unix_ms, delivery.next_unix_ms + UNDELIVERED_MS)
    return kept_unix_ms


def waits_anew(progress: Progress, envelope: Envelope, now_unix_ms: int) -> Progress:
    """A call that a worker may have had waits for another one: how long it ran is no part of how long it may wait."""
    return msgspec.structs.replace(progress, queue_until_unix_ms=now_unix_ms + envelope.queue_s * 1000)


def claimed(progress: Progress, gateway: str, now_unix_ms: int, *, fresh_run: bool = False) -> Progress:
    """Claimed by a gateway. `fresh_run`: the ledger has closed the previous gateway's run, so this is another one."""
    what = "started" if progress.status == "queued" else "taken over from a dead gateway"
    return _noted(
        msgspec.structs.replace(
            progress,
            status="running",
            claims=progress.claims + 1,
            gateway=gateway,
            runs=progress.runs + fresh_run,
            due_unix_ms=now_unix_ms + LEASE_MS,
            started_unix_ms=progress.started_unix_ms or now_unix_ms,
            told=None,
        ),
        now_unix_ms,
        what,
    )


def renewed(progress: Progress, now_unix_ms: int, reported: ReportedProgress | None = None) -> Progress:
    """Lease renewed. `reported`: progress that the handler reported since the claim."""
    return msgspec.structs.replace(progress, due_unix_ms=now_unix_ms + LEASE_MS, told=reported)


def handed_back(progress: Progress, now_unix_ms: int) -> Progress:
    """Queued again by a gateway that shuts down: another one takes it at once."""
    back = msgspec.structs.replace(
        progress, status="queued", gateway="", runs=progress.runs + 1, due_unix_ms=now_unix_ms, told=None
    )
    return _noted(back, now_unix_ms, "handed back by a gateway that shuts down")


def cancelling(progress: Progress, envelope: Envelope, now_unix_ms: int) -> Progress:
    """Cancelled, or marked for it while running; one that has ended stays as it is."""
    if progress.status == "queued":
        return ended(progress, envelope, RunOutcome(), now_unix_ms)
    if progress.status == "running" and not progress.cancelling:
        return _noted(msgspec.structs.replace(progress, cancelling=True), now_unix_ms, "to be cancelled")
    return progress


def expired(progress: Progress, envelope: Envelope, now_unix_ms: int) -> Progress:
    error = ErrorInfo(
        code="expired",
        message=f"it was not run within the {envelope.queue_s} s that it could wait",
        hint="give it longer with Fs-Queue-Timeout-S, or raise `scale.max`",
    )
    return _ended(progress, envelope, "expired", now_unix_ms, error=progress.error or error)


def ended(progress: Progress, envelope: Envelope, outcome: RunOutcome, now_unix_ms: int) -> Progress:
    """State after an execution: ended, or queued again for a retry."""
    error = outcome.error
    progress = _billed(progress, outcome.row)
    if progress.cancelling and (outcome.answer is None or not outcome.sent):
        return _ended(progress, envelope, "cancelled", now_unix_ms)
    if error is not None and error.code in NO_ROOM and not progress.cancelling:
        return _again(progress, error, now_unix_ms, failures=progress.losses)
    if error is not None and error.code in UNSENT and not outcome.sent:
        # A missing node may stay away, and each run has a row; one that waited for a worker was long enough already.
        failures = progress.runs if error.code == Unavailable.code else progress.losses
        return _again(progress, error, now_unix_ms, failures=failures)
    if error is not None and error.code in LOST and not progress.cancelling:
        losses = progress.losses + 1
        if losses < LOSSES_MAX:
            lost = msgspec.structs.replace(progress, losses=losses)
            again = _again(lost, error, now_unix_ms, failures=losses)
            return waits_anew(again, envelope, again.due_unix_ms)
        dead = msgspec.structs.replace(progress, losses=losses, dead=True)
        return _ended(dead, envelope, "failed", now_unix_ms, error=error, answer=outcome.answer)
    if outcome.answer is None and error is None:
        return _ended(progress, envelope, "cancelled", now_unix_ms)
    good = error is None and outcome.answer is not None and outcome.answer.http_status < 400
    status: Status = "succeeded" if good else "failed"
    return _ended(progress, envelope, status, now_unix_ms, error=error, answer=outcome.answer)


def redriven(progress: Progress, envelope: Envelope, now_unix_ms: int) -> Progress:
    """Queued again as if accepted now; its history stays."""
    again = Progress(
        due_unix_ms=now_unix_ms,
        queue_until_unix_ms=now_unix_ms + envelope.queue_s * 1000,
        claims=progress.claims,
        runs=progress.runs + 1,
        redrives=progress.redrives + 1,
        bill=progress.bill,
        moments=progress.moments,
    )
    return _noted(again, now_unix_ms, "redriven")


def backoff_ms(failures: int, *, base_ms: int = BACKOFF_MS, most_ms: int = BACKOFF_MAX_MS) -> int:
    """Exponential backoff before the next attempt."""
    return int(min(most_ms, base_ms * 2 ** min(max(failures, 1) - 1, 16)))


def _billed(progress: Progress, row: InvocationRow | None) -> Progress:
    """Adds a run's bill to that of the runs before it, some of which are billed although they are repeated."""
    if row is None:
        return progress
    before = progress.bill
    bill = RunsBill(
        billed_ms=row.billed_ms + (before.billed_ms if before is not None else 0),
        cost_nusd=row.cost_nusd + (before.cost_nusd if before is not None else 0),
        version=row.version,
        start=row.start if row.worker else "",
    )
    return msgspec.structs.replace(progress, bill=bill)


def _again(progress: Progress, error: ErrorInfo, now_unix_ms: int, *, failures: int) -> Progress:
    """Queued again, after a wait for so many failures."""
    asked_ms = round((error.retry_after_s or 0) * 1000)
    wait_ms = max(backoff_ms(failures), min(asked_ms, BACKOFF_MAX_MS))
    queued = msgspec.structs.replace(
        progress,
        status="queued",
        gateway="",
        runs=progress.runs + 1,
        due_unix_ms=now_unix_ms + wait_ms,
        error=error,
        told=None,
    )
    return _noted(queued, now_unix_ms, f"{error.code}, to be tried again after {wait_ms} ms")


def _ended(
    progress: Progress,
    envelope: Envelope,
    status: Status,
    now_unix_ms: int,
    *,
    error: ErrorInfo | None = None,
    answer: Answer | None = None,
) -> Progress:
    done = msgspec.structs.replace(
        progress,
        status=status,
        gateway="",
        finished_unix_ms=now_unix_ms,
        answer=answer,
        error=error,
        delivery=Delivery(next_unix_ms=now_unix_ms) if envelope.webhook else None,
    )
    return _noted(done, now_unix_ms, status if not done.dead else f"{status}, a dead letter")


def _noted(progress: Progress, now_unix_ms: int, what: str) -> Progress:
    """Adds a history event. Of too many, the first ones and the last ones stay."""
    moments = [*progress.moments, HistoryEvent(unix_ms=now_unix_ms, what=what)]
    if len(moments) > MOMENTS_MAX:
        moments = moments[:4] + moments[5:]
    return msgspec.structs.replace(progress, moments=moments)


# ── webhooks ───────────────────────────────────────────────────────────────────────────────────────


def message_id(progress: Progress, envelope: Envelope) -> str:
    """The id of an end's webhook, the same for each attempt: receivers drop a second message with one that they know,
    and an invocation that was redriven ends again."""
    return envelope.id if not progress.redrives else f"{envelope.id}.redrive-{progress.redrives}"


def delivering(progress: Progress, now_unix_ms: int) -> Progress:
    """Delivery claimed until `next_unix_ms`, by the gateway that writes this state."""
    delivery = progress.delivery or Delivery()
    tried = msgspec.structs.replace(delivery, tries=delivery.tries + 1, next_unix_ms=now_unix_ms + DELIVERY_LEASE_MS)
    return msgspec.structs.replace(progress, delivery=tried)


def delivered(progress: Progress, now_unix_ms: int, *, http_status: int, error: str) -> Progress:
    """State after a delivery attempt; `error` is empty if the receiver answered 2xx."""
    delivery = progress.delivery or Delivery()
    if not error:
        taken = Delivery(
            state="delivered", tries=delivery.tries, http_status=http_status, delivered_unix_ms=now_unix_ms
        )
        return _noted(msgspec.structs.replace(progress, delivery=taken), now_unix_ms, "webhook delivered")
    over = delivery.tries >= DELIVERIES_MAX
    wait_ms = backoff_ms(delivery.tries, base_ms=DELIVERY_BACKOFF_MS, most_ms=DELIVERY_BACKOFF_MAX_MS)
    after = msgspec.structs.replace(
        delivery,
        state="failed" if over else "pending",
        next_unix_ms=0 if over else now_unix_ms + wait_ms,
        http_status=http_status,
        error=error[:300],
    )
    failed = msgspec.structs.replace(progress, delivery=after)
    return _noted(failed, now_unix_ms, "webhook given up") if over else failed


def redelivered(progress: Progress, now_unix_ms: int) -> Progress:
    return msgspec.structs.replace(progress, delivery=Delivery(next_unix_ms=now_unix_ms))
