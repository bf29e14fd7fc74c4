"""Tables of a backup: the keys of Redis that belong to it, and the record of each.

Left out is what comes again by itself (leases, nodes, workers, orders, measures), what is only of interest for a while
(logs, traces, history), and what would run a second time: stored async calls, and the answers of idempotent ones.
Weights, code, packages and the files of volumes are in the object store, under names that the records here have.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import LedgerRow
from fleetstart.runtime.contract.billing.prices import PriceSheet
from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.function.names import is_function_name
from fleetstart.runtime.contract.function.volume import VolumeRecord
from fleetstart.runtime.contract.ids import FunctionName
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord

from ..billing.archive_format import decode_header, parse_entry
from ..billing.budgets import Budget
from ..schemas.access import AuditEvent
from ..state.access_records import KeyRecord, ProjectRecord, SecretRecord
from ..state.identity_records import AuthorityRecord, NodeIdentity
from ..state.records import FunctionRecord, VersionRecord

Kind = Literal["hash", "stream", "string"]
Fields = Mapping[str, bytes]
State = dict[str, dict[str, bytes]]
"""Records by key and field: of a stream the field is an entry's id, of a string it is empty."""

VERSIONS_PREFIX = keys.versions(FunctionName(""))
STREAM_FIELD = {keys.LEDGER: "row", keys.LEDGER_LATE: "row", keys.AUDIT: "event"}
"""The field in which an entry of each stream has its record."""


class RecordsUnreadable(FleetError):
    """Records that this release cannot read: broken, or written by a later one."""

    code = "records_unreadable"


@dataclass(frozen=True, slots=True)
class Table:
    """A key that belongs to a backup. `record`: the type of its values; None: whole numbers."""

    kind: Kind
    record: Any = None
    decoder: RecordDecoder[Any] | None = None
    name: str = ""
    """The record's attribute that must be its field; empty: none."""


def _hash(record: Any, name: str = "") -> Table:
    return Table("hash", record, RecordDecoder(record), name)


TABLES: dict[str, Table] = {
    keys.FUNCTIONS: _hash(FunctionRecord, "name"),
    keys.FUNCTIONS_LAST: Table("hash"),
    keys.KEYS: _hash(KeyRecord, "name"),
    keys.KEYS_USED: Table("hash"),
    keys.PROJECTS: _hash(ProjectRecord, "name"),
    keys.SECRETS: _hash(SecretRecord, "field"),
    keys.WEBHOOK_SECRETS: Table("hash", bytes),
    keys.VOLUMES: _hash(VolumeRecord, "full_name"),
    keys.BUDGETS: _hash(Budget),
    keys.PRICES: _hash(PriceSheet, "version"),
    keys.SCHEDULES: Table("hash", bytes),
    keys.NODES_DRAINING: Table("hash"),
    keys.NODES_IDENTITIES: _hash(NodeIdentity, "node"),
    keys.AUTHORITY: _hash(AuthorityRecord),
    keys.LEDGER: Table("stream", LedgerRow, RecordDecoder(LedgerRow)),  # type: ignore[arg-type]
    keys.LEDGER_LATE: Table("stream", LedgerRow, RecordDecoder(LedgerRow)),  # type: ignore[arg-type]
    keys.LEDGER_SEGMENTS: Table("hash", bytes),
    keys.LEDGER_SPENT: Table("hash"),
    keys.LEDGER_HORIZON: Table("string"),
    keys.FENCE: Table("string"),
    keys.AUDIT: Table("stream", AuditEvent, RecordDecoder(AuditEvent)),
}
VERSIONS = _hash(VersionRecord, "version")
NUMBER_MAX = 1 << 60


def table_of(key: str) -> Table | None:
    """The table of a key; None for a key that belongs to no backup."""
    if key.startswith(VERSIONS_PREFIX):
        return VERSIONS if is_function_name(key.removeprefix(VERSIONS_PREFIX)) else None
    return TABLES.get(key)


def problem(key: str, field: str, value: bytes) -> str:
    """Why a record cannot be restored by this release; empty if it can."""
    table = table_of(key)
    if table is None:
        return "no backup has such a key"
    if table.kind == "stream" and not _is_entry(field):
        return f"{field[:40]!r} is no entry's id"
    if table.kind == "string" and field:
        return f"a single value has no field {field[:40]!r}"
    if table.record is None:
        return "" if value.isdigit() and int(value[:20]) < NUMBER_MAX else f"{value[:40]!r} is no number"
    if table.decoder is None:
        return _segment_problem(field, value) if key == keys.LEDGER_SEGMENTS else ""
    try:
        record = table.decoder.decode(value)
    except UnreadableRecord as error:
        return str(error)
    named = str(getattr(record, table.name)) if table.name else field
    if named != field:
        return f"the record is of {named[:80]!r}"
    if isinstance(record, VersionRecord) and record.spec.name != key.removeprefix(VERSIONS_PREFIX):
        return f"the version is of function {record.spec.name[:80]!r}"
    return ""


def _is_entry(text: str) -> bool:
    try:
        entry = parse_entry(text)
    except ValueError:
        return False
    return str(entry) == text and entry > (0, 0) and 0 <= entry.unix_ms < NUMBER_MAX and 0 <= entry.number < NUMBER_MAX


def _segment_problem(field: str, value: bytes) -> str:
    try:
        decode_header(value, int(field))
    except Exception as error:  # a closed list would be that of another module
        return str(error)[:200]
    return ""


def unreadable(state: State) -> dict[str, str]:
    """What of a state this release cannot read, by key and field."""
    return {
        f"{key} {field}".strip(): error
        for key, fields in state.items()
        for field, value in fields.items()
        if (error := problem(key, field, value))
    }


def without(state: State, names: Collection[str]) -> State:
    """The state without the records of these names, as `unreadable` has them."""
    return {
        key: {field: value for field, value in fields.items() if f"{key} {field}".strip() not in names}
        for key, fields in state.items()
    }


def require_readable(state: State, what: str) -> None:
    """Errors: RecordsUnreadable."""
    if found := unreadable(state):
        name, error = next(iter(found.items()))
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise RecordsUnreadable(
            f"{what}: {name}{more} cannot be read by this release: {error[:200]}",
            hint="a later release may have written it: restore with that one, or give --leave-unreadable to do without",
        )


def require_whole(state: State) -> None:
    """Checks that the records belong together. Errors: RecordsUnreadable."""
    require_readable(state, "the backup")
    for name in state.get(keys.FUNCTIONS, {}):
        if not state.get(keys.versions(FunctionName(name))):
            raise RecordsUnreadable(f"the backup: function {name} has no version")
    segments = state.get(keys.LEDGER_SEGMENTS, {})
    missing = next((n for n in range(1, len(segments) + 1) if str(n) not in segments), None)
    if missing is not None:
        raise RecordsUnreadable(f"the backup: segment {missing} of {len(segments)} of the ledger is missing")


def masters(state: State) -> list[str]:
    """Ids of the master keys that the secrets of a state are encrypted with."""
    found = set()
    for key in (keys.SECRETS, keys.WEBHOOK_SECRETS):
        for raw in state.get(key, {}).values():
            try:
                found.add(_SECRETS.decode(raw).master)
            except UnreadableRecord:
                continue
    return sorted(found)


_SECRETS = RecordDecoder(SecretRecord)
