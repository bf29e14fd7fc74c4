"""One line of the audit log."""

from __future__ import annotations

import msgspec

from ..state.access_records import Quotas, Right


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


class NewKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    rights: list[Right]
    functions: list[str] = []
    project: str = ""
    expires_s: float | None = None
    """From now."""


class Rotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    grace_s: float = 3600.0
    """How long the text before is still good."""


class KeyInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    rights: list[Right]
    functions: list[str]
    project: str
    id: str
    """Of its newest text: what comes after `fs_`."""
    previous_id: str = ""
    """Of the text before its last rotation."""
    created_unix_ms: int
    created_by: str
    expires_unix_ms: int
    """0: never."""
    state: str
    """`good`, `expired` or `revoked`."""
    old_until_unix_ms: int = 0
    """Until when the text before its last rotation is good; 0: it is not."""
    used_unix_ms: int = 0
    """0: never."""


class KeyCreated(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    info: KeyInfo
    first: bool = False
    """Whether there was none before: from now on every request needs one."""


class ProjectTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    quotas: Quotas | None = None
    """None leaves them as they are."""


class ProjectInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    quotas: Quotas
    functions: list[str]
    workers: int
    """What its functions may come to."""
    memory_bytes: int
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
    """Workers of these that run: they keep the value that they started with."""


class Rekeyed(msgspec.Struct, frozen=True, kw_only=True):
    secrets: int
    master: str
    """Id of the key that they are encrypted with now."""
