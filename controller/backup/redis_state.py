"""Reading and writing the state of a backup in Redis: each at one moment, in one transaction.

A backup is consistent while calls run: the names of the functions are read first, then everything in one transaction,
and again if there was a function more by then. A restore watches what it has read, and the leases of controllers and
nodes: if any of them changes before its one transaction, nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import redis
from redis.exceptions import WatchError

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import began_unix_ms
from fleetstart.runtime.contract.errors import Conflict
from fleetstart.runtime.contract.ids import FunctionName

from ..billing.archive_format import EntryId, decode_entry, decode_header
from .merge import merged, removed_keys, sorted_entries
from .tables import STREAM_FIELD, TABLES, VERSIONS_PREFIX, State, require_readable

TRIES = 20
BATCH = 500
"""Fields of one command: a command's arguments are in memory three times."""
RUNNING_HINT = (
    "stop it first: `fs down`, and `fs down` on every machine that has joined; leases of what was killed end after 5 s"
)


def read_state(client: redis.Redis) -> State:
    """Everything that belongs to a backup, at one moment. Errors: RedisError, Conflict."""
    for _ in range(TRIES):
        names = _function_names(client)
        state = _snapshot(client, names)
        if {*state[keys.FUNCTIONS]} <= names:
            return {key: fields for key, fields in state.items() if fields}
    raise Conflict("functions are deployed faster than they are read", hint="try again in a quieter moment")


def _function_names(client: redis.Redis) -> set[str]:
    return {name.decode() for name in _many(client.hkeys(keys.FUNCTIONS))}


def _many(value: Any) -> Iterable[bytes]:
    return value  # type: ignore[no-any-return]


def _snapshot(client: redis.Redis, names: set[str]) -> State:
    tables = {key: table.kind for key, table in TABLES.items()}
    tables |= {keys.versions(FunctionName(name)): "hash" for name in sorted(names)}
    with client.pipeline(transaction=True) as pipe:
        for key, kind in tables.items():
            if kind == "hash":
                pipe.hgetall(key)
            elif kind == "stream":
                pipe.xrange(key, "-", "+")
            else:
                pipe.get(key)
        found = pipe.execute()
    return {key: _fields(key, kind, raw) for (key, kind), raw in zip(tables.items(), found, strict=True)}


def _fields(key: str, kind: str, raw: Any) -> dict[str, bytes]:
    if kind == "hash":
        return {field.decode(errors="replace"): value for field, value in raw.items()}
    if kind == "stream":
        name = STREAM_FIELD[key].encode()
        return {entry.decode(): fields[name] for entry, fields in raw if name in fields}
    return {"": raw} if raw is not None else {}


def running_parts(client: redis.Redis) -> list[str]:
    """Controllers and nodes with a lease. Errors: RedisError."""
    found = [key.decode() for key in client.scan_iter(f"{keys.GATEWAY_PREFIX}*", count=1000)]
    found += [key.decode() for key in client.scan_iter("fs:node:*", count=1000)]
    return sorted(["controller " + key.removeprefix(keys.GATEWAY_PREFIX) if key.startswith(keys.GATEWAY_PREFIX)
                   else "node " + key.removeprefix("fs:node:") for key in found])  # fmt: skip


def require_stopped(client: redis.Redis) -> None:
    """Errors: Conflict, if anything runs on this Redis."""
    if parts := running_parts(client):
        more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
        raise Conflict(f"the system runs: {', '.join(parts[:3])}{more} use this Redis", hint=RUNNING_HINT)


def write_state(client: redis.Redis, backup: State) -> State:
    """Joins a backup with what Redis holds, all or nothing, and returns what it holds then.

    Errors: RedisError, Conflict, RecordsUnreadable.
    """
    with client.pipeline(transaction=True) as pipe:
        known_names = _function_names(client) | {
            key.decode().removeprefix(VERSIONS_PREFIX) for key in client.scan_iter(f"{VERSIONS_PREFIX}*", count=1000)
        }
        names = known_names | {*backup.get(keys.FUNCTIONS, {})}
        pipe.watch(  # type: ignore[no-untyped-call]
            keys.LEADER, *TABLES, *(keys.versions(FunctionName(name)) for name in sorted(names))
        )
        require_stopped(client)
        known = _snapshot(client, names)
        require_readable(known, "what is in Redis")
        after = merged(known, backup)
        pipe.multi()
        _queue_writes(pipe, known, after)
        try:
            pipe.execute()
        except WatchError as error:
            raise Conflict(
                "the system was started while it was restored: nothing was changed", hint=RUNNING_HINT
            ) from (error)
    return after


def _queue_writes(pipe: Any, known: State, after: State) -> None:
    for key in removed_keys(known, after):
        pipe.delete(key)
    for key, fields in after.items():
        if fields == known.get(key, {}):
            continue
        kind = TABLES[key].kind if key in TABLES else "hash"
        if kind == "string":
            pipe.set(key, fields[""])
        elif kind == "hash":
            pipe.delete(key)
            _set_fields(pipe, key, fields)
        else:
            _write_stream(pipe, key, fields, known.get(key, {}))
    _keep_last_entry(pipe, after)
    for entry, raw in sorted_entries(after[keys.LEDGER]):
        row = decode_entry(str(entry).encode(), raw).row
        pipe.zadd(keys.LEDGER_IDS, {row.id: max(entry.unix_ms, began_unix_ms(row))}, gt=True)


def _set_fields(pipe: Any, key: str, fields: dict[str, bytes]) -> None:
    items = list(fields.items())
    for start in range(0, len(items), BATCH):
        pipe.hset(key, mapping=dict(items[start : start + BATCH]))


def _write_stream(pipe: Any, key: str, fields: dict[str, bytes], known: dict[str, bytes]) -> None:
    """Writes a stream again. Its last id stays the largest there was: ids of later entries never go back."""
    pipe.delete(key)
    for entry, raw in sorted_entries(fields):
        pipe.xadd(key, {STREAM_FIELD[key]: raw}, id=str(entry))
    if known and (last := sorted_entries(known)[-1][0]) > max((e for e, _ in sorted_entries(fields)), default=_BEFORE):
        _advance(pipe, key, last)


def _keep_last_entry(pipe: Any, after: State) -> None:
    """Lets the ledger's stream go on behind its segments, even if Redis' clock is behind them."""
    segments = after[keys.LEDGER_SEGMENTS]
    if segments and not after[keys.LEDGER]:
        pipe.delete(keys.LEDGER)
        _advance(pipe, keys.LEDGER, decode_header(segments[str(len(segments))], len(segments)).last)


def _advance(pipe: Any, key: str, last: EntryId) -> None:
    pipe.xadd(key, {STREAM_FIELD[key]: b""}, id=str(last))
    pipe.xdel(key, str(last))


_BEFORE = EntryId(0, 0)
