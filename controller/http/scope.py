"""Scope keys: what one ASGI middleware leaves in the scope for those behind it."""

from __future__ import annotations

from dataclasses import dataclass

CALLER_IDENTITY = "fleetstart.caller"
"""Scope key of a `CallerIdentity`, for the layers before the gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerIdentity:
    """The project and API key of a call."""

    project: str = ""
    key: str = ""
    """Name of the API key."""


API_CALLER = "fs.caller"
"""Scope key of the `Caller` of a request to the management API."""

API_KEY_NAME = "fs.key"
"""Scope key of the API key's name, for the ledger; absent where there are no keys."""

AUDITED_ACTION = "fs.deed"
"""Scope key of the `AuditedAction`, for the audit log."""


PROGRESS = "fs.progress"
"""Scope key of a stored call: its worker reports its progress."""
