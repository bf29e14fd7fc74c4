"""What is kept of an invocation that outlives its connection.

An `Envelope` is the call as it was accepted and never changes; `Progress` is what has become of it so far. Both lie in
Redis, the envelope also at the head of the request in the object store, so that a Redis that lost its last second can
be told again. Bodies and answers are in the store alone.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.ids import FunctionName, InvocationId

Status = Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]
Origin = Literal["async", "sync", "schedule", "replay"]
ENDED: frozenset[Status] = frozenset(("succeeded", "failed", "cancelled", "expired"))
MOMENTS_MAX = 32
"""Lines of an invocation's history: more are retries that look alike."""
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
    """sha256 of method, target and body: the same call again, or another one under the same id."""
    accepted_unix_ms: int
    queue_s: int
    """How long it may wait for its turn, retries included."""
    ttl_s: int
    """How long its answer is kept after its end."""
    origin: Origin = "async"
    source: str = ""
    """The invocation that it replays, or the moment for which it was scheduled."""
    webhook: str = ""
    project: str = ""
    key: str = ""
    """Name of the API key that it was accepted with."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The head of a kept answer; its body lies in the store, under the claim that made it."""

    claim: int
    http_status: int
    headers: list[tuple[str, str]]
    body_bytes: int
    content_type: str = ""
    billed_ms: int = 0
    cost: str = ""
    """Dollars."""
    version: int = 0
    start: str = ""


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """How far the webhook is."""

    state: Literal["pending", "delivered", "failed"] = "pending"
    tries: int = 0
    next_unix_ms: int = 0
    """When it is tried (again), or when whoever tries it now is taken for dead."""
    http_status: int = 0
    """That the receiver answered last."""
    error: str = ""
    delivered_unix_ms: int = 0


class HistoryEvent(msgspec.Struct, frozen=True, kw_only=True):
    unix_ms: int
    what: str


class ReportedProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far its handler last said that it was."""

    fraction: float
    message: str = ""
    unix_ms: int


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    status: Status = "queued"
    due_unix_ms: int = 0
    """Queued: not before. Running: when whoever runs it is taken for dead."""
    queue_until_unix_ms: int = 0
    claims: int = 0
    """How often a gateway took it: the fencing token of whoever has it."""
    gateway: str = ""
    runs: int = 1
    """Which execution it is at: each has a row of its own in the ledger."""
    losses: int = 0
    """Executions that the platform lost; too many end it."""
    cancelling: bool = False
    started_unix_ms: int = 0
    finished_unix_ms: int = 0
    answer: Answer | None = None
    error: ErrorInfo | None = None
    dead: bool = False
    """Whether it failed because the platform did, again and again: a dead letter."""
    delivery: Delivery | None = None
    moments: list[HistoryEvent] = []
    told: ReportedProgress | None = None
    """Of the run under way, or of the one that ended it."""

    @property
    def ended(self) -> bool:
        return self.status in ENDED


def run_id(invocation: InvocationId, run: int) -> InvocationId:
    """The request id of one execution, and so of its row: the first has the invocation's own."""
    return invocation if run <= 1 else InvocationId(f"{invocation}.{run}")
