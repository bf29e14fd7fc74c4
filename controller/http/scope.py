"""Keys under which one ASGI layer leaves something in the scope for a layer behind it."""

from __future__ import annotations

from dataclasses import dataclass

CALLER_IDENTITY = "fleetstart.caller"
"""For layers of the gateway: an `CallerIdentity`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerIdentity:
    """Whose call it is."""

    project: str = ""
    key: str = ""
    """Name of the API key."""


API_CALLER = "fs.caller"
"""In the scope: who it is, if the management API is asked."""

API_KEY_NAME = "fs.key"
"""In the scope: the key's name, for the ledger; absent where there are no keys."""

AUDITED_ACTION = "fs.deed"
"""In the scope: what the audit log shall say."""


PROGRESS = "fs.progress"
"""In the scope of a call whose answer is kept: its worker is to tell how far it is."""
