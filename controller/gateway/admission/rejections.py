"""Errors of rejected calls: the reason, Retry-After, and how that was computed."""

from __future__ import annotations

import math

from fleetstart.runtime.contract.errors import FleetError, Overloaded, QueueFull, QueueTimeout
from fleetstart.runtime.contract.ids import FunctionName
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.wait_estimate import PendingStart, WaitEstimate

RETRY_LEAST_S = 0.05
RETRY_MOST_S = 3600.0
RETRY_UNKNOWN_S = 5.0
"""Retry-After where nothing is known of a start: short enough to come back in time."""


def retry_after_s(wait: WaitEstimate) -> float:
    if not math.isfinite(wait.seconds):
        return RETRY_UNKNOWN_S
    return min(max(wait.seconds, RETRY_LEAST_S), RETRY_MOST_S)


def rejection(name: FunctionName, wait: WaitEstimate, *, allowed_s: float | None, at_most: bool) -> FleetError:
    """The error of a call that is not admitted.

    `allowed_s`: how long it would have waited; None if the queue is full. `at_most`: the function runs `scale.max`
    workers already, so that only its owner can change that.
    """
    details = _explanation(wait)
    if allowed_s is None:
        why = f"{wait.queued} calls wait already, as many as may"
    elif allowed_s == 0:
        why = "no worker is free now, and the call is not to wait"
    else:
        why = f"its predicted wait is {_seconds(wait.seconds)}, and it waits {_seconds(allowed_s)} at most"
    kind = QueueFull if at_most else Overloaded
    hint = "try again after Retry-After seconds"
    hint += ", or raise `scale.max`" if at_most else ""
    return kind(f"function {name}: {why}: {details}", hint=hint, retry_after_s=retry_after_s(wait), wait=_finite(wait))


def queue_timeout(name: FunctionName, wait: WaitEstimate, *, waited_s: float) -> QueueTimeout:
    return QueueTimeout(
        f"function {name}: no worker took the call within its queue timeout of {_seconds(waited_s)}: "
        f"{_explanation(wait)}",
        hint="try again after Retry-After seconds, or let it wait longer: `Fs-Queue-Timeout-S`, queue_timeout_s",
        retry_after_s=retry_after_s(wait),
        wait=_finite(wait),
    )


def _finite(wait: WaitEstimate) -> WaitEstimate | None:
    return wait if math.isfinite(wait.seconds) else None


def _explanation(wait: WaitEstimate) -> str:
    parts = []
    if wait.slots:
        place = "slot" if wait.slots == 1 else "slots"
        parts.append(f"{wait.queued} wait for {wait.slots} {place}, each taken for {_seconds(wait.call_s)} a call")
    elif wait.queued:
        parts.append(f"{wait.queued} wait for a worker")
    parts += [_start(worker) for worker in sorted(wait.coming, key=lambda one: one.ready_s)[:2]]
    return "; ".join(parts) or "no worker is ready, and none starts yet"


def _start(worker: PendingStart) -> str:
    text = f"a worker is expected in {_seconds(worker.ready_s)}"
    if worker.weight_bytes > worker.fetched_bytes and worker.bytes_per_s > 0:
        had, of = worker.fetched_bytes / MIB, worker.weight_bytes / MIB
        text += f", with {had:.0f} of {of:.0f} MiB of its weights here and more at {worker.bytes_per_s / MIB:.0f} MiB/s"
    return text


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if math.isfinite(seconds) else "an unknown time"
