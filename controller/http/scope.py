"""Scope keys: what one ASGI middleware leaves in the scope for those behind it."""

from __future__ import annotations

from dataclasses import dataclass

from fleetstart.runtime.contract.billing.ledger import InvocationRow
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version

CALLER_IDENTITY = "fleetstart.caller"
"""Scope key of a `CallerIdentity`, for the layers before the gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerIdentity:
    """The project and API key of a call."""

    project: str = ""
    key: str = ""
    """Name of the API key."""


CALL_ORIGIN = "fs.origin"
"""Scope key of the `CallOrigin` of a call that a function made; absent from clients' calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOrigin:
    """Origin of a call that a function made."""

    parent: InvocationId
    """The call for which it is made."""
    chain: tuple[FunctionName, ...]
    """The functions above it: the one that a client called first, the caller last."""


GIVEN_REQUEST_ID = "fs.request_id"
"""Scope key of the caller's own `X-Request-Id` of a call, which informs people; absent if it sent none that is valid.
The header itself has the platform's id by then."""

REPEAT_KEY = "fs.repeat"
"""Scope key of what is the same in each run of a call that may run several times: its idempotency key, or the id of the
stored invocation."""

API_CALLER = "fs.caller"
"""Scope key of the `Caller` of a request to the management API."""

API_KEY_NAME = "fs.key"
"""Scope key of the API key's name, for the ledger; absent where there are no keys."""

AUDITED_ACTION = "fs.deed"
"""Scope key of the `AuditedAction`, for the audit log."""


STORED_CALL = "fs.stored"
"""Scope key of the `StoredCall` of an async call; absent from others."""


@dataclass(slots=True)
class StoredCall:
    """One run of an async call, whose worker reports its progress: what gateway and runner tell each other."""

    version: Version | None = None
    """`Envelope.version`."""
    queue_ends_ns: int = 0
    """When it may wait for a worker no longer, on the monotonic clock; 0: until its deadline."""
    sent: bool = False
    """It was sent to a worker, which may have run it."""
    handed_back: bool = False
    """Its client leaves because the controller shuts down: the call is run again elsewhere, and this run is free."""
    row: InvocationRow | None = None
    """Its row, once it has ended: an answer that was cut, or is large, does not say what it cost."""


ORIGIN_ALLOWED = "fs.origin_allowed"
"""Scope key of a call whose page's origin is in its function's `cors`; absent otherwise."""
