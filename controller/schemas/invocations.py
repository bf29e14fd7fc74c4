"""Structs of the management API and of webhooks: stored invocations, webhook secrets, schedules."""

from __future__ import annotations

import msgspec

from fleetstart.runtime.contract.billing.ledger import InvocationRow
from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.ids import FunctionName, InvocationId
from fleetstart.runtime.contract.timeline import Timeline

from ..state.invocation_records import Delivery, HistoryEvent, Origin, ReportedProgress, Status

RESULT_INLINE_BYTES = 64 * 1024
"""JSON answers up to this stand in the invocation itself."""


class InvocationInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: InvocationId
    function: FunctionName
    status: Status
    origin: Origin
    method: str
    target: str
    url: str
    result_url: str
    events_url: str
    accepted_unix_ms: int
    queue_until_unix_ms: int
    started_unix_ms: int = 0
    finished_unix_ms: int = 0
    kept_until_unix_ms: int = 0
    """0 while it has not ended."""
    cancelling: bool = False
    dead_letter: bool = False
    runs: int = 1
    error: ErrorInfo | None = None
    http_status: int = 0
    content_type: str = ""
    result_bytes: int = 0
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """The answer itself, if it is JSON and small."""
    version: int = 0
    start: str = ""
    billed_ms: int = 0
    """Of all its runs together, some of which are billed although they are repeated; so is its cost."""
    cost: str = ""
    webhook: str = ""
    delivery: Delivery | None = None
    source: str = ""
    history: list[HistoryEvent] = []
    progress: ReportedProgress | None = None
    """Progress that its handler reported, up to a second old; None without a report."""
    row: InvocationRow | msgspec.UnsetType = msgspec.UNSET
    """Ledger row of its last run, as in InvocationTrace; present together with `timeline`."""
    timeline: Timeline | msgspec.UnsetType = msgspec.UNSET
    isolation: str = ""
    pooled: bool = False
    events: int = 0


class ReplayTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int | str | None = None
    """A number or an alias; none: the one that is live now."""


class WebhookSecret(msgspec.Struct, frozen=True, kw_only=True):
    project: str
    secret: str
    old_until_unix_ms: int = 0
    """Until then deliveries have signatures by the secrets before it, too; 0: they have not."""


class WebhookRotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    grace_s: float = 86_400.0
    """How long the old secret still signs, beside the new one."""


class ScheduleInfo(msgspec.Struct, frozen=True, kw_only=True):
    function: FunctionName
    version: int
    schedule: str
    timezone: str
    next_unix_ms: int
    last_unix_ms: int = 0
    """Time at which it was last due; 0 before the first time."""
    last: InvocationId | None = None
    status: Status | None = None
    """Status of the last invocation, while it is stored."""
