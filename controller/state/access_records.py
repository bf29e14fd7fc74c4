"""Records of API keys, projects and secrets in Redis. No key and no secret is stored in cleartext."""

from __future__ import annotations

import hashlib
import re
from typing import Literal, get_args

import msgspec

from fleetstart.runtime.contract.errors import InvalidInput
from fleetstart.runtime.contract.function.names import DEFAULT_PROJECT, project_of

Right = Literal["invoke", "read", "deploy", "node", "admin"]
"""The permissions of a key. `deploy` includes `read`; `node` is to join as a node; `admin` includes everything."""
RIGHTS: tuple[Right, ...] = get_args(Right)
_INCLUDED: dict[Right, frozenset[Right]] = {
    "invoke": frozenset({"invoke"}),
    "read": frozenset({"read"}),
    "deploy": frozenset({"deploy", "read"}),
    "node": frozenset({"node"}),
    "admin": frozenset(RIGHTS),
}
LOCAL = "local"
"""Name of callers without a key where none is needed, and of the owner of the home; no key may have it."""
DEFAULT = DEFAULT_PROJECT
"""The project of functions that name none. It always exists."""
FUNCTIONS_MAX = 100
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")


def check_name(what: str, name: str) -> str:
    """Checks the name of a key or a project. Errors: InvalidInput."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{what} name {name[:80]!r} is not allowed",
            hint="use 1 to 63 of a-z, 0-9, . _ and -, a letter or digit at either end",
        )
    return name


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """A credential of a key, as a hash; after a rotation the key has two for a while."""

    id: str
    sha256: str
    created_unix_ms: int
    expires_unix_ms: int = 0
    """0: never."""

    def expired(self, now_unix_ms: int) -> bool:
        return 0 < self.expires_unix_ms <= now_unix_ms


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An API key. It is kept after it was revoked: the ledger and the audit log name it, and its name is not reused."""

    name: str
    rights: list[Right]
    functions: list[str] = []
    """Full names of the functions that it is limited to; empty: all of its project."""
    project: str = ""
    """Project that it is limited to; empty: all projects."""
    credentials: list[Credential]
    """Its credentials, the newest first."""
    created_unix_ms: int
    created_by: str
    revoked_unix_ms: int = 0

    def may(self, right: Right) -> bool:
        return any(right in _INCLUDED[own] for own in self.rights)

    @property
    def limited(self) -> bool:
        """Checks whether it is limited to some functions."""
        return bool(self.functions or self.project)

    @property
    def projects(self) -> frozenset[str]:
        """The projects that it is limited to, by its project or its functions; empty: all."""
        return frozenset({self.project} if self.project else {project_of(function) for function in self.functions})

    def covers(self, function: str) -> bool:
        """Checks whether a function of this full name is among those that it is limited to, existing or not."""
        if not self.limited:
            return True
        return (not self.functions or function in self.functions) and self.project in ("", project_of(function))

    def usable(self, now_unix_ms: int) -> bool:
        return not self.revoked_unix_ms and not self.credentials[0].expired(now_unix_ms)


QUOTA_MAX = 10**15
"""Largest quota: a number that JSON readers keep to the last digit, and more than any project has of anything."""


class Quotas(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quotas of a project; None is no limit."""

    functions: int | None = None
    workers: int | None = None
    """Workers that run at a time, of all versions; and the sum of its functions' `scale.max` at a deploy."""
    memory_bytes: int | None = None
    """The sum of what these workers may use."""
    calls_per_s: float | None = None
    store_bytes: int | None = None
    """What its keys have put into the object store."""
    objects: int | None = None
    """Their number."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 <= value <= QUOTA_MAX:
                raise InvalidInput(f"quota {name} must be 0 to {QUOTA_MAX:,}, got {value}", hint="`none` is no limit")


Network = Literal["listed", "any"]
"""What the functions of a project may ask for in `network`: a list, or the node's whole network (`True`)."""


class ProjectRecord(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    quotas: Quotas = Quotas()
    network: Network = "listed"
    created_unix_ms: int
    created_by: str


class SecretRecord(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Name of the environment variable."""
    project: str
    box: str
    """AES-256-GCM: nonce and ciphertext, base64 (`auth.secret_encryption`)."""
    master: str
    """Id of the master key that it is encrypted with."""
    size_bytes: int
    created_unix_ms: int
    updated_unix_ms: int
    updated_by: str

    @property
    def field(self) -> str:
        return secret_field(self.project, self.name)


def secret_field(project: str, name: str) -> str:
    """The field of a secret in fs:secrets."""
    return f"{project}/{name}"


def digest(record: msgspec.Struct | None) -> str:
    """A short digest of a record for the audit log, which shows a change without its content; "" for no record."""
    if record is None:
        return ""
    plain = msgspec.to_builtins(record, str_keys=True)  # a split has numbers for keys, which have no order of their own
    return hashlib.sha256(msgspec.json.encode(plain, order="deterministic")).hexdigest()[:12]
