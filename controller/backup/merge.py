"""Merge of a backup into a Redis: the state of the backup, and of what never goes back the later of both. Pure.

Functions, projects, secrets, volumes and budgets become those of the backup. Revocations of either side hold, numbers
of versions and of volumes are the larger ones, and no row and no segment of the ledger is lost. So it does not matter
whether the Redis was empty, older than the backup or newer.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import Conflict
from fleetstart.runtime.contract.function.volume import VolumeRecord
from fleetstart.runtime.contract.ids import FunctionName
from fleetstart.runtime.contract.record_decoder import RecordDecoder

from ..billing.archive_format import EntryId, decode_header, parse_entry
from ..state.access_records import Credential, KeyRecord
from ..state.records import FunctionRecord
from .tables import STREAM_FIELD, TABLES, VERSIONS_PREFIX, State

_FUNCTION, _VOLUME, _KEY = RecordDecoder(FunctionRecord), RecordDecoder(VolumeRecord), RecordDecoder(KeyRecord)


def merged(known: State, backup: State) -> State:
    """The state after the restore of a backup into what a Redis holds; both can be read. Errors: Conflict."""
    result = {key: _JOINS.get(key, _replaced)(known.get(key, {}), backup.get(key, {})) for key in TABLES}
    for name in backup.get(keys.FUNCTIONS, {}):
        key = keys.versions(FunctionName(name))
        first = _FUNCTION.decode(backup[keys.FUNCTIONS][name]).first
        later = {number: raw for number, raw in known.get(key, {}).items() if int(number) >= first}
        result[key] = _same(key, later, backup.get(key, {}))
    _keep_numbers(result, known)
    _settle_ledger(result)
    return result


def removed_keys(known: State, after: State) -> list[str]:
    """Keys that are to be deleted: versions of functions that the backup does not have."""
    return sorted(key for key in known if key.startswith(VERSIONS_PREFIX) and not after.get(key))


def _replaced(_: dict[str, bytes], backup: dict[str, bytes]) -> dict[str, bytes]:
    return dict(backup)


def _united(known: dict[str, bytes], backup: dict[str, bytes]) -> dict[str, bytes]:
    return {**known, **backup}


def _latest(known: dict[str, bytes], backup: dict[str, bytes]) -> dict[str, bytes]:
    """The larger number of each field."""
    fields = sorted({*known, *backup})
    return {field: b"%d" % max(int(known.get(field, b"0")), int(backup.get(field, b"0"))) for field in fields}


def _same(key: str, known: dict[str, bytes], backup: dict[str, bytes]) -> dict[str, bytes]:
    """Records that never change once they are written. Errors: Conflict, if one did."""
    for field in sorted({*known} & {*backup}):
        if known[field] != backup[field]:
            raise Conflict(
                f"{key} has another record {field} than the backup: they are of different systems",
                hint="restore into the Redis of the system that was backed up, or into an empty one",
            )
    return {**known, **backup}


def _segments(known: dict[str, bytes], backup: dict[str, bytes]) -> dict[str, bytes]:
    return _same(keys.LEDGER_SEGMENTS, known, backup)


def _fence(known: dict[str, bytes], backup: dict[str, bytes]) -> dict[str, bytes]:
    """One more than any controller has had: a scheduler of before writes nothing any more."""
    return {"": b"%d" % (int(_latest(known, backup).get("", b"0")) + 1)}


def _keys(known: dict[str, bytes], backup: dict[str, bytes]) -> dict[str, bytes]:
    result = {**known, **backup}
    for name in {*known} & {*backup}:
        if known[name] != backup[name]:
            result[name] = msgspec.json.encode(joined_key(_KEY.decode(known[name]), _KEY.decode(backup[name])))
    return result


def joined_key(one: KeyRecord, other: KeyRecord) -> KeyRecord:
    """A key of which two records are known: revoked if either says so, its credentials those of the last rotation."""
    older, newer = sorted((one, other), key=lambda record: record.credentials[0].created_unix_ms)
    expiries = {credential.id: credential.expires_unix_ms for credential in older.credentials}
    credentials = [_earlier(credential, expiries.get(credential.id, 0)) for credential in newer.credentials]
    revoked = [record.revoked_unix_ms for record in (one, other) if record.revoked_unix_ms]
    return msgspec.structs.replace(newer, credentials=credentials, revoked_unix_ms=min(revoked, default=0))


def _earlier(credential: Credential, expires_unix_ms: int) -> Credential:
    ends = [unix_ms for unix_ms in (credential.expires_unix_ms, expires_unix_ms) if unix_ms]
    return msgspec.structs.replace(credential, expires_unix_ms=min(ends, default=0))


def _volumes(known: dict[str, bytes], backup: dict[str, bytes]) -> dict[str, bytes]:
    result = dict(backup)
    for name in {*known} & {*backup}:
        record, other = _VOLUME.decode(backup[name]), _VOLUME.decode(known[name])
        if other.last > record.last:
            result[name] = msgspec.json.encode(msgspec.structs.replace(record, last=other.last))
    return result


_Join = Callable[[dict[str, bytes], dict[str, bytes]], dict[str, bytes]]
_JOINS: dict[str, _Join] = {
    keys.FUNCTIONS_LAST: _latest,
    keys.KEYS: _keys,
    keys.KEYS_USED: _latest,
    keys.VOLUMES: _volumes,
    keys.PRICES: _united,
    keys.LEDGER: _united,
    keys.LEDGER_LATE: _united,
    keys.LEDGER_SEGMENTS: _segments,
    keys.LEDGER_SPENT: _latest,
    keys.LEDGER_HORIZON: _latest,
    keys.FENCE: _fence,
    keys.AUDIT: _united,
}
"""How what never goes back is joined; everything else becomes that of the backup."""


def _keep_numbers(result: State, known: State) -> None:
    """Numbers of versions stay taken, also those of functions that the backup does not have."""
    last = {name: int(number) for name, number in result[keys.FUNCTIONS_LAST].items()}
    for state in (known, result):
        for key, versions in state.items():
            if key.startswith(VERSIONS_PREFIX) and versions:
                name = key.removeprefix(VERSIONS_PREFIX)
                last[name] = max(last.get(name, 0), *map(int, versions))
    result[keys.FUNCTIONS_LAST] = {name: b"%d" % number for name, number in sorted(last.items())}


def _settle_ledger(result: State) -> None:
    """Rows that a segment has leave the stream. Ids of rows in segments are not known: they are looked up there."""
    segments = result[keys.LEDGER_SEGMENTS]
    if segments:
        last = decode_header(segments[str(len(segments))], len(segments)).last
        rows = result[keys.LEDGER]
        result[keys.LEDGER] = {entry: raw for entry, raw in rows.items() if parse_entry(entry) > last}
        horizon = int(result[keys.LEDGER_HORIZON].get("", b"0"))
        result[keys.LEDGER_HORIZON] = {"": b"%d" % max(horizon, last.unix_ms + 1)}


def sorted_entries(fields: dict[str, bytes]) -> list[tuple[EntryId, bytes]]:
    """Entries of a stream in its order."""
    return sorted((parse_entry(field), raw) for field, raw in fields.items())


assert {*STREAM_FIELD} == {key for key, table in TABLES.items() if table.kind == "stream"}
