"""Events of the history: changes out of the audit log, failed starts, and alerts of budgets, as one list.

`merged_events` is pure. Who made a change is in the audit log only, which takes an admin's key to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import dollars

from ..auth.audit_log import AuditLog
from ..billing.budgets import BudgetEvent
from ..schemas.access import AuditEvent
from ..schemas.history import EventKind, SystemEvent

AUDIT_ROWS = 1_000
"""Changes that are read at most, the newest of the span's end first."""

VERBS: dict[str, tuple[EventKind, str]] = {
    "function.deploy": ("deploy", "deployed"),
    "function.rollback": ("deploy", "rolled back"),
    "function.rm": ("change", "removed"),
    "function.scale": ("change", "scale changed"),
    "function.split": ("change", "traffic split changed"),
    "function.alias": ("change", "alias changed"),
    "function.alias.rm": ("change", "alias removed"),
    "budget.set": ("change", "budget set"),
    "budget.rm": ("change", "budget removed"),
    "node.join": ("node", "joined"),
    "node.drain": ("node", "is drained"),
    "node.undrain": ("node", "gets workers again"),
    "node.rm": ("node", "was removed"),
}
"""Kind and text of each change that the history shows, by its verb in the audit log."""


class EventReader:
    """Reads events from Redis and the audit log."""

    def __init__(self, client: redis.Redis, audit: AuditLog) -> None:
        self._client = client
        self._audit = audit

    async def events(self, since_unix_ms: int, until_unix_ms: int) -> list[SystemEvent]:
        """All events of the span, the newest first. Errors: REDIS_ERRORS, StoreFailed."""

        def shown(event: AuditEvent) -> bool:
            return event.verb in VERBS and event.status < 400 and event.unix_ms < until_unix_ms

        audited = await self._audit.read(since_unix_ms, "", AUDIT_ROWS, shown)
        async with self._client.pipeline(transaction=False) as pipe:
            for stream in (keys.HISTORY_FAILURES, keys.ALERTS):
                pipe.xrange(stream, str(since_unix_ms), str(until_unix_ms - 1))
            failures, alerts = await pipe.execute()
        return merged_events(audited, _of(failures, SystemEvent), _of(alerts, BudgetEvent))


def _of(entries: Any, kind: type[Any]) -> list[Any]:
    return [msgspec.json.decode(fields[b"event"], type=kind) for _, fields in entries]


def merged_events(
    audited: Iterable[AuditEvent], failures: Iterable[SystemEvent], alerts: Iterable[BudgetEvent]
) -> list[SystemEvent]:
    """One list of all, the newest first."""
    found = [*map(_of_change, audited), *failures, *map(_of_alert, alerts)]
    return sorted(found, key=lambda event: event.unix_ms, reverse=True)


def _of_change(event: AuditEvent) -> SystemEvent:
    kind, text = VERBS[event.verb]
    name = event.object.partition(" ")[2]  # "function hello", "node vm2"
    if kind == "node":
        return SystemEvent(unix_ms=event.unix_ms, kind=kind, text=f"{name} {text}".strip())
    return SystemEvent(unix_ms=event.unix_ms, kind=kind, function=name, text=text)


def _of_alert(event: BudgetEvent) -> SystemEvent:
    what = "the budget is spent, calls are rejected" if event.stage == "spent" else "the budget will be spent soon"
    return SystemEvent(
        unix_ms=event.unix_ms,
        kind="budget",
        function=event.function,
        text=f"{what}: {_usd(event.spent_nusd)} of {_usd(event.limit_nusd)} for {event.period}",
    )


def _usd(nusd: int) -> str:
    return f"${dollars(nusd).rstrip('0').rstrip('.')}"


def visible_events(
    events: Iterable[SystemEvent], function: str, sees: Callable[[str], bool], *, limited: bool
) -> list[SystemEvent]:
    """The events of a function, or of all, that a caller may see. Those of nodes need an unlimited key."""
    return [
        event
        for event in events
        if (not limited if event.kind == "node" else sees(event.function))
        and (function in ("", event.function) or event.kind == "node")
    ]
