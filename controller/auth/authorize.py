"""Authentication and authorization decisions. Pure: the access table, a key, a demand and the time in, an error out.

An error names the missing right. A key that may not see a function gets the same answer as if there were none: 404, not
403. What a key may see follows from full names alone (`contract.function.names`): a limited key reaches the functions
of its project, or those that it names, whether they exist or not.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from fleetstart.runtime.contract.errors import Forbidden, NotFound, Unauthorized
from fleetstart.runtime.contract.function.names import FULL_NAME_MAX, full_name
from fleetstart.runtime.contract.ids import FunctionName

from ..state.access_records import DEFAULT, LOCAL, KeyRecord, Right
from ..state.access_table import AccessTable
from .api_key import PREFIX, MalformedKey, ParsedKey, parse_key

HEADER_MAX_BYTES = 1024
"""A longer header holds no key, and is not parsed."""
_NO_HASH = "0" * 64
"""Compared with if the id is unknown, so that the comparison takes as long."""
KEY_HINT = (
    "send `Authorization: Bearer fs_...`, or set FS_KEY for `fs`; `fs up` writes a key to FS_HOME/key "
    "(~/.fleetstart/key), and `fs key recover` creates another if it is lost"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller of a request, and what its key allows."""

    name: str
    key: KeyRecord | None
    """None: a local caller, with all rights."""

    @property
    def limited(self) -> bool:
        return self.key is not None and self.key.limited

    @property
    def project(self) -> str:
        """The project that the key is limited to; empty if it is not."""
        return self.key.project if self.key is not None else ""

    @property
    def home(self) -> str:
        """The project of names that are written without one: the key's, if it is limited to exactly one."""
        projects = self.key.projects if self.key is not None else frozenset()
        return next(iter(projects)) if len(projects) == 1 else DEFAULT

    def full_name(self, name: str) -> FunctionName:
        """The full name of a function as the caller means it."""
        return full_name(name, self.home)

    def sees(self, function: str) -> bool:
        """Checks whether the key may see a function of this full name."""
        return not self.limited or (self.key is not None and bool(function) and self.key.covers(function))

    def sees_project(self, project: str) -> bool:
        """Checks whether the key may see something of the project."""
        return not self.limited or (self.key is not None and project in self.key.projects)

    def still_valid(self, table: AccessTable, now_unix_ms: int) -> bool:
        """Checks whether the key is neither revoked nor expired by now; for responses that go on for long."""
        if self.key is None:
            return True
        record = table.keys.get(self.key.name)
        return record is not None and record.usable(now_unix_ms)

    def require(self, function: str, known: Iterable[str]) -> None:
        """Demands that the key may see the function. Errors: NotFound, as for a function that does not exist."""
        if not self.sees(function):
            raise self._no_such_function(function, known)

    def require_existing(self, function: str, known: Collection[str]) -> None:
        """Demands that the function exists and that the key may see it. Errors: NotFound, the same for both."""
        if function not in known or not self.sees(function):
            raise self._no_such_function(function, known)

    def _no_such_function(self, function: str, known: Iterable[str]) -> NotFound:
        near = get_close_matches(function[:FULL_NAME_MAX], [name for name in known if self.sees(name)], n=1)
        hint = f"did you mean {near[0]}?" if near else "`fs ls` lists what there is"
        return NotFound(f"function {function[:FULL_NAME_MAX]} does not exist", hint=hint)

    def require_right(self, right: Right, what: str) -> None:
        """Demands a right of the key. Errors: Forbidden."""
        if self.key is not None and not self.key.may(right):
            raise Forbidden(
                f"key {self.name} may {_listed(self.key.rights)}; {what} needs {right}",
                hint=f"an admin makes a key that may: fs key create NAME --scope {right}",
            )

    def require_unlimited(self, what: str) -> None:
        """Demands a key that is not limited to a project or to functions. Errors: Forbidden."""
        if self.key is not None and self.key.limited:
            limits = f"functions {_listed(self.key.functions)}" if self.key.functions else f"project {self.project}"
            raise Forbidden(
                f"key {self.name} is for {limits}; {what} is about all",
                hint="use a key that was made without --function and --project",
            )


def project_not_found(project: str, known: Iterable[str]) -> NotFound:
    near = get_close_matches(project[:80], known, n=1)
    hint = f"did you mean {near[0]}?" if near else "`fs project ls` lists what there is"
    return NotFound(f"project {project[:80]} does not exist", hint=hint)


def local_caller() -> Caller:
    return Caller(name=LOCAL, key=None)


def key_in_headers(authorization: bytes | None, own: bytes | None) -> str | None:
    """Extracts the key's text from an `Authorization` or `Fs-Key` header; None if there is none.

    What a browser sends by itself does not count, neither Basic nor a cookie: functions' own pages share this origin.
    """
    if own is not None:
        return own[:HEADER_MAX_BYTES].decode("latin-1").strip()
    if authorization is None or len(authorization) > HEADER_MAX_BYTES:
        return None
    kind, _, value = authorization.decode("latin-1").strip().partition(" ")
    return value.strip() if kind.lower() == "bearer" else None


def is_fleetstart_key(authorization: bytes) -> bool:
    """Checks whether an `Authorization` header holds a key of this system, which must not reach a handler."""
    return authorization[:64].decode("latin-1").partition(" ")[2].strip().startswith(PREFIX)


def authenticate(table: AccessTable, text: str | None, now_unix_ms: int) -> KeyRecord:
    """Returns the record of a valid key. Errors: Unauthorized."""
    if not text:
        raise Unauthorized("an API key is needed, and none was sent", hint=KEY_HINT)
    try:
        shown = parse_key(text)
    except MalformedKey as error:
        raise Unauthorized(f"the key is malformed: {error}", hint=KEY_HINT) from error
    record = _proven(table, shown)
    if record is None:
        raise Unauthorized(
            "the key is unknown to this system", hint="`fs key ls` lists its keys; FS_URL selects the system"
        )
    credential = next(credential for credential in record.credentials if credential.id == shown.id)
    if record.revoked_unix_ms:
        raise Unauthorized(f"key {record.name} was revoked", hint="ask an admin for another: fs key create NAME")
    if credential.expired(now_unix_ms):
        rotated = credential is not record.credentials[0]
        why = "was rotated, and this is the old one" if rotated else "has expired"
        raise Unauthorized(f"key {record.name} {why}", hint=f"an admin renews it: fs key rotate {record.name}")
    return record


def _proven(table: AccessTable, shown: ParsedKey) -> KeyRecord | None:
    found = table.by_id.get(shown.id)
    expected = found[1].sha256 if found is not None else _NO_HASH
    return found[0] if hmac.compare_digest(shown.sha256, expected) and found is not None else None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
