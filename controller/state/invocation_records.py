"""Records of stored invocations (async, scheduled, replayed, or kept for replay) in Redis and in the object store.

An `Envelope` is the call as it was accepted and never changes; `Progress` is its state so far. Both lie in Redis, the
envelope also at the head of the request in the object store, so that it can be restored to a Redis that lost its last
second. Bodies and answers are in the store alone.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version

Status = Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]
Origin = Literal["async", "sync", "schedule", "replay"]
ENDED: frozenset[Status] = frozenset(("succeeded", "failed", "cancelled", "expired"))
MOMENTS_MAX = 32
"""Maximum entries of an invocation's history: more are retries that look alike."""
MESSAGE_MAX = 300


class Envelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call as it was accepted."""

    id: InvocationId
    function: FunctionName
    method: str
    target: str
    """Path and query of the invoke URL, escapes and all."""
    headers: list[tuple[str, str]]
    body_bytes: int
    fingerprint: str
    """sha256 of project, method, target and body, to tell a repeated call from another one under the same id."""
    accepted_unix_ms: int
    queue_s: int
    """Maximum time in the queue, retries included."""
    ttl_s: int
    """Retention of its answer after its end."""
    version: Version | None = None
    """The version that it would have gone to then. A function whose first one is later is another one of that name.
    None: an earlier release accepted it."""
    origin: Origin = "async"
    source: str = ""
    """The invocation that it replays, or the time that it was scheduled for."""
    webhook: str = ""
    project: str = ""
    key: str = ""
    """Name of the API key that it was accepted with."""
    request_id: str = ""
    """The caller's own id, for people."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Status and headers of a stored answer; its body lies in the object store, under the claim that made it."""

    claim: int
    http_status: int
    headers: list[tuple[str, str]]
    body_bytes: int
    content_type: str = ""
    billed_ms: int = 0
    cost: str = ""
    """Cost in dollars."""
    version: int = 0
    start: str = ""


class RunsBill(msgspec.Struct, frozen=True, kw_only=True):
    """The bill of an invocation's runs together, as their rows have it; version and start are those of the last one,
    and `start` is empty if no worker took it."""

    billed_ms: int
    cost_nusd: int
    version: int
    start: str


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """State of an invocation's webhook delivery."""

    state: Literal["pending", "delivered", "failed"] = "pending"
    tries: int = 0
    next_unix_ms: int = 0
    """Time of the next attempt; during an attempt, the time after which it counts as lost."""
    http_status: int = 0
    """Last status of the receiver."""
    error: str = ""
    delivered_unix_ms: int = 0


class HistoryEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of an invocation's history."""

    unix_ms: int
    what: str


class ReportedProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress as last reported by the handler."""

    fraction: float
    message: str = ""
    unix_ms: int


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a stored invocation."""

    status: Status = "queued"
    due_unix_ms: int = 0
    """Queued: earliest start. Running: expiry of the runner's lease."""
    queue_until_unix_ms: int = 0
    claims: int = 0
    """Number of claims by gateways; the fencing token of the current one."""
    gateway: str = ""
    runs: int = 1
    """Number of the execution; each has its own row in the ledger."""
    redrives: int = 0
    """How often it was queued again after its end, and so how many ends before this one had a webhook."""
    losses: int = 0
    """Executions that the platform lost; too many end the invocation."""
    cancelling: bool = False
    started_unix_ms: int = 0
    finished_unix_ms: int = 0
    answer: Answer | None = None
    bill: RunsBill | None = None
    """None: no run has ended, or those of an earlier release."""
    error: ErrorInfo | None = None
    dead: bool = False
    """True if it is a dead letter: the platform failed repeatedly."""
    delivery: Delivery | None = None
    moments: list[HistoryEvent] = []
    told: ReportedProgress | None = None
    """Progress of the current run, or of the last one."""

    @property
    def ended(self) -> bool:
        return self.status in ENDED


def run_id(invocation: InvocationId, run: int) -> InvocationId:
    """The request id of an execution and of its row; the first has the invocation's own."""
    return invocation if run <= 1 else InvocationId(f"{invocation}.{run}")
