"""Structs of the management API: audit log, API keys, projects, secrets."""

from __future__ import annotations

import msgspec

from ..state.access_records import Network, Quotas, Right


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One row of the audit log."""

    unix_ms: int
    by: str
    """Name of the key; `local` for the owner of a home and for callers that need no key; empty without a valid key."""
    address: str = ""
    """IP address of the caller."""
    verb: str
    object: str = ""
    status: int
    code: str = ""
    """Error code, if the request failed."""
    before: str = ""
    after: str = ""
    """Digests of the object; equal ones: it did not change."""
    times: int = 1
    """Number of rejections that the row stands for."""


class NewKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    rights: list[Right]
    functions: list[str] = []
    """A name without a project is in `project`, or in `default`."""
    project: str = ""
    expires_s: float | None = None
    """Lifetime from now; None: no expiry."""


class Rotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    grace_s: float = 3600.0
    """How long the old text still works."""


class KeyInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    rights: list[Right]
    functions: list[str]
    project: str
    id: str
    """Id of its newest text, after `fs_`."""
    previous_id: str = ""
    """Id of the text before its last rotation."""
    created_unix_ms: int
    created_by: str
    expires_unix_ms: int
    """0: never."""
    state: str
    """`good`, `expired` or `revoked`."""
    old_until_unix_ms: int = 0
    """End of the grace period of the text before its last rotation; 0: it has ended."""
    used_unix_ms: int = 0
    """0: never."""


class KeyCreated(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    info: KeyInfo
    first: bool = False
    """True if this is the first key: from now on every request needs one."""
    warning: str = ""
    """What may be a mistake: a function that it names does not exist."""


class ProjectTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    quotas: Quotas | None = None
    """None leaves them as they are."""
    network: Network | None = None
    """None leaves it as it is."""


class ProjectInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    quotas: Quotas
    network: Network = "listed"
    """Networks that functions in it may have: with `listed` only an admin's keys deploy those with `network=True`."""
    functions: list[str]
    workers: int
    """Sum of its functions' `scale.max`. A key that is limited to functions sees these functions and their sums."""
    memory_bytes: int
    store_bytes: int | None = None
    """Bytes that its keys have put into the object store and that are still there; None while Redis does not answer."""
    objects: int | None = None
    """Number of these objects."""
    secrets: list[str]


class SecretValue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: str

    def __repr__(self) -> str:
        return "SecretValue(***)"


class SecretInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    project: str
    size_bytes: int
    master: str
    """Id of the master key that it is encrypted with."""
    created_unix_ms: int
    updated_unix_ms: int
    updated_by: str
    used_by: list[str]
    """Functions whose live version declares it."""
    running: int = 0
    """Running workers of these functions: they keep the value that they started with."""


class Rekeyed(msgspec.Struct, frozen=True, kw_only=True):
    secrets: int
    master: str
    """Id of the key that they are encrypted with now."""
