"""Handlers of API keys: create, list, rotate, revoke. A key's text is returned once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import InvalidInput, NotFound
from fleetstart.runtime.contract.function.names import full_name, is_function_name, project_of

from ..auth.api_key import NewKeyText, new_key_text
from ..auth.request_context import caller_of, set_audit_object
from ..http.json_api import json_body, json_response, now_unix_ms
from ..schemas.access import KeyCreated, KeyInfo, NewKey, Rotation
from ..state.access_records import DEFAULT, FUNCTIONS_MAX, LOCAL, Credential, KeyRecord, check_name
from ..state.access_table import AccessTable
from ..state.cas_hash import CasHash
from ..state.sync import StateSync

LIFE_MAX_S = 10 * 366 * 86_400
GRACE_MAX_S = 30 * 86_400


class KeysApi:
    def __init__(self, state: StateSync) -> None:
        self._state = state
        self._hash = CasHash(state, keys.KEYS, KeyRecord)

    @property
    def _table(self) -> AccessTable:
        return self._state.view.access

    async def keys(self, request: Request) -> Response:
        used: Any = await self._state.client.hgetall(keys.KEYS_USED)
        now = now_unix_ms()
        records = sorted(self._table.keys.values(), key=lambda record: record.name)
        return json_response([info(one, now, int(used.get(one.name.encode(), 0))) for one in records])

    async def create(self, request: Request) -> Response:
        new = await json_body(request, NewKey)
        set_audit_object(request, new.name[:80])
        now = now_unix_ms()
        made = new_key_text()
        table = self._table
        record = _record(new, made, table, now, caller_of(request).name)

        def first_of_its_name(known: KeyRecord | None) -> KeyRecord:
            if known is not None:
                why = "was revoked, and its name is not given again" if known.revoked_unix_ms else "exists already"
                raise InvalidInput(f"key {new.name} {why}", hint="choose another name, or: fs key rotate NAME")
            return record

        await self._hash.change(new.name, first_of_its_name)
        created = KeyCreated(
            key=made.text,
            info=info(record, now),
            first=not table.locked,
            warning=_warning(record.functions, self._state.view.functions),
        )
        return json_response(created, status=201)

    async def rotate(self, request: Request) -> Response:
        name = request.path_params["name"]
        terms = await json_body(request, Rotation)
        if not 0 <= terms.grace_s <= GRACE_MAX_S:
            raise InvalidInput(f"a grace period has 0 s to {GRACE_MAX_S // 86_400} days, got {terms.grace_s:g} s")
        now = now_unix_ms()
        made = new_key_text()
        record = await self._hash.change(name, lambda known: _rotated(self._known(known, name), made, terms, now))
        assert record is not None
        return json_response(KeyCreated(key=made.text, info=info(record, now)))

    async def revoke(self, request: Request) -> Response:
        name = request.path_params["name"]
        now = now_unix_ms()

        def revoked(known: KeyRecord | None) -> KeyRecord:
            record = self._known(known, name)
            if record.revoked_unix_ms:
                return record
            _require_another_admin(self._table, record, now)
            return msgspec.structs.replace(record, revoked_unix_ms=now)

        record = await self._hash.change(name, revoked, durable=True)  # nobody looks a second time
        assert record is not None
        return json_response(info(record, now))

    def _known(self, record: KeyRecord | None, name: str) -> KeyRecord:
        if record is None:
            near = get_close_matches(name[:80], self._table.keys, n=1)
            hint = f"did you mean {near[0]}?" if near else "`fs key ls` lists what there is"
            raise NotFound(f"key {name[:80]} does not exist", hint=hint)
        return record


def info(record: KeyRecord, now: int, used_unix_ms: int = 0) -> KeyInfo:
    newest, *older = record.credentials
    state = "revoked" if record.revoked_unix_ms else "good" if record.usable(now) else "expired"
    old = max((one.expires_unix_ms for one in older if not one.expired(now)), default=0)
    return KeyInfo(
        name=record.name,
        rights=record.rights,
        functions=record.functions,
        project=record.project,
        id=newest.id,
        previous_id=older[0].id if older else "",
        created_unix_ms=record.created_unix_ms,
        created_by=record.created_by,
        expires_unix_ms=newest.expires_unix_ms,
        state=state,
        old_until_unix_ms=old if state != "revoked" else 0,
        used_unix_ms=used_unix_ms,
    )


def _record(new: NewKey, made: NewKeyText, table: AccessTable, now: int, by: str) -> KeyRecord:
    """Errors: InvalidInput."""
    check_name("key", new.name)
    if new.name == LOCAL:
        raise InvalidInput(f"no key may be called {LOCAL}: the audit log names callers without a key so")
    if not new.rights:
        raise InvalidInput(
            "a key needs at least one right", hint="--scope invoke, read, deploy or admin; several may be given"
        )
    if len(new.functions) > FUNCTIONS_MAX:
        raise InvalidInput(
            f"a key is for {FUNCTIONS_MAX} functions at most, got {len(new.functions)}", hint="--project"
        )
    functions = sorted({_function(function, new.project) for function in new.functions})
    if new.project and not table.has_project(new.project):
        near = get_close_matches(new.project[:80], table.projects, n=1)
        hint = f"did you mean {near[0]}?" if near else f"make it first: fs project create {new.project[:63]}"
        raise InvalidInput(f"project {new.project[:80]} does not exist", hint=hint)
    if new.expires_s is not None and not 1 <= new.expires_s <= LIFE_MAX_S:
        raise InvalidInput(f"a key lives 1 s to ten years, got {new.expires_s:g} s")
    expires_unix_ms = now + round(new.expires_s * 1000) if new.expires_s is not None else 0
    record = KeyRecord(
        name=new.name,
        rights=list(dict.fromkeys(new.rights)),
        functions=functions,
        project=new.project,
        credentials=[Credential(id=made.id, sha256=made.sha256, created_unix_ms=now, expires_unix_ms=expires_unix_ms)],
        created_unix_ms=now,
        created_by=by,
    )
    if not table.locked and (record.limited or not record.may("admin") or expires_unix_ms):
        raise InvalidInput(
            f"the first key must be an admin's, for all functions and without expiry: once {new.name[:63]} exists, "
            "every request needs a key, and only an admin can create others",
            hint="fs key create admin --scope admin",
        )
    return record


def _function(name: str, project: str) -> str:
    """The full name of a function that a key names. Errors: InvalidInput."""
    if not is_function_name(name):
        raise InvalidInput(
            f"function name {name[:200]!r} is not allowed", hint="write NAME, or PROJECT.NAME for one of a project"
        )
    full = full_name(name, project or DEFAULT)
    if project and project_of(full) != project:
        raise InvalidInput(
            f"the key is for project {project}, and {full} is in {project_of(full)}",
            hint="name the function without its project, or leave out the project",
        )
    return full


def _warning(functions: Sequence[str], known: Collection[str]) -> str:
    """Names the functions that do not exist, and what else they may be called."""
    missing = [name for name in functions if name not in known]
    if not missing:
        return ""
    near = [one for name in missing for one in known if one.rpartition(".")[2] == name.rpartition(".")[2]]
    near += [one for name in missing for one in get_close_matches(name, known, n=1) if one not in near]
    hint = f"; did you mean {' or '.join(near[:5])}?" if near else "; the key works for it from then on"
    return f"not deployed yet: {', '.join(missing)}{hint}"


def _rotated(record: KeyRecord, made: NewKeyText, terms: Rotation, now: int) -> KeyRecord:
    """Adds a credential with the lifetime of the last one, which expires after the grace period."""
    if record.revoked_unix_ms:
        raise InvalidInput(f"key {record.name} was revoked", hint="make another: fs key create NAME")
    last = record.credentials[0]
    life_ms = last.expires_unix_ms - last.created_unix_ms if last.expires_unix_ms else 0
    ends = now + round(terms.grace_s * 1000)
    old = msgspec.structs.replace(last, expires_unix_ms=min(ends, last.expires_unix_ms or ends))
    new = Credential(
        id=made.id, sha256=made.sha256, created_unix_ms=now, expires_unix_ms=now + life_ms if life_ms else 0
    )
    return msgspec.structs.replace(record, credentials=[new, old])


def _require_another_admin(table: AccessTable, leaving: KeyRecord, now: int) -> None:
    """Errors: InvalidInput."""
    if leaving.limited or not leaving.may("admin"):
        return
    for record in table.keys.values():
        lasting = record.usable(now) and not record.credentials[0].expires_unix_ms
        if record.name != leaving.name and record.may("admin") and not record.limited and lasting:
            return
    raise InvalidInput(
        f"key {leaving.name} is the last admin key: without it no others could be created",
        hint="create another first (fs key create NAME --scope admin), or rotate this one: fs key rotate",
    )
