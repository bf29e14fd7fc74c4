"""States of systems for tests of backups."""

from __future__ import annotations

import msgspec

from fleetstart.controller.backup.tables import State
from fleetstart.controller.billing.archive_format import EntryId, LedgerEntry, SegmentHeader, pack
from fleetstart.controller.state.access_records import Credential, KeyRecord, SecretRecord
from fleetstart.controller.state.records import FunctionRecord, VersionRecord
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, FunctionName, Version
from tests.controller.billing.rows import call


def key(name: str, *, at: int = 1, revoked: int = 0, ends: int = 0) -> KeyRecord:
    """A key whose last rotation was at `at`; its credential before that ends at `ends`, if that is not 0."""
    credentials = [Credential(id=f"{name}{at}", sha256="00", created_unix_ms=at)]
    if ends:
        credentials.append(Credential(id=f"{name}1", sha256="00", created_unix_ms=1, expires_unix_ms=ends))
    return KeyRecord(
        name=name,
        rights=["invoke"],
        credentials=credentials,
        created_unix_ms=1,
        created_by="t",
        revoked_unix_ms=revoked,
    )


def function(name: str, live: int, first: int = 1) -> bytes:
    record = FunctionRecord(name=FunctionName(name), live=Version(live), first=Version(first), deployed_unix_ms=1)
    return msgspec.json.encode(record)


def version(name: str, number: int, *, code: str = "a") -> bytes:
    spec = FunctionSpec(name=FunctionName(name), bundle=BundleId(code * 64), entry="handler:run")
    record = VersionRecord(
        version=Version(number), digest=code * 64, spec=spec, segment_bytes=0, created_unix_ms=1
    )  # fmt: skip
    return msgspec.json.encode(record)


def row(at: int) -> tuple[str, bytes]:
    return f"{at}-0", msgspec.json.encode(call(f"call-{at}", at=at))


def segment(after: SegmentHeader | None, *times: int) -> SegmentHeader:
    entries = [LedgerEntry(EntryId(at, 0), msgspec.json.encode(call(f"call-{at}", at=at)), call(f"call-{at}", at=at))
               for at in times]  # fmt: skip
    return pack(entries, after)[0]


def system(**more: dict[str, bytes]) -> State:
    """A system with a function of two versions, a key, a secret and rows in a segment and in the stream."""
    secret = SecretRecord(
        name="TOKEN", project="default", box="AAAA", master="m1", size_bytes=4, created_unix_ms=1, updated_unix_ms=1,
        updated_by="t",
    )  # fmt: skip
    return {
        keys.FUNCTIONS: {"hello": function("hello", 2)},
        keys.versions(FunctionName("hello")): {"1": version("hello", 1), "2": version("hello", 2, code="b")},
        keys.FUNCTIONS_LAST: {"hello": b"2", "gone": b"7"},
        keys.KEYS: {"app": msgspec.json.encode(key("app"))},
        keys.SECRETS: {"default/TOKEN": msgspec.json.encode(secret)},
        keys.WEBHOOK_SECRETS: {"default": b"\xff\x00 no text"},
        keys.LEDGER_SEGMENTS: {"1": segment(None, 10, 20).line},
        keys.LEDGER: dict([row(30), row(40)]),
        keys.LEDGER_HORIZON: {"": b"5"},
        keys.LEDGER_SPENT: {"0:hello": b"70"},
        keys.FENCE: {"": b"3"},
        **more,
    }
