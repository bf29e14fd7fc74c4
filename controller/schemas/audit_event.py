"""One line of the audit log."""

from __future__ import annotations

import msgspec


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    unix_ms: int
    by: str
    """Name of the key; `local` for the owner of a home, and for who needs none; empty for who showed none."""
    address: str = ""
    """Where the request came from."""
    verb: str
    object: str = ""
    status: int
    code: str = ""
    """Of the error, if it was refused."""
    before: str = ""
    after: str = ""
    """Digests of the object; equal ones: nothing has changed."""
    times: int = 1
    """How many refusals of this kind the line stands for."""
