"""What never goes back in a restore: revocations, numbers, rows, segments."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.backup.merge import joined_key, merged, removed_keys
from fleetstart.controller.state.access_records import KeyRecord
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import Conflict
from fleetstart.runtime.contract.function.volume import VolumeRecord
from fleetstart.runtime.contract.ids import FunctionName
from tests.controller.backup.states import function, key, row, segment, system, version

HELLO = keys.versions(FunctionName("hello"))


def test_an_empty_redis_gets_the_backup_and_a_later_fence() -> None:
    after = merged({}, system())
    expected = {**system(), keys.FENCE: {"": b"4"}, keys.LEDGER_HORIZON: {"": b"21"}}
    assert {name: fields for name, fields in after.items() if fields} == expected


@pytest.mark.parametrize("revoked_in_backup", [False, True])
def test_a_key_that_either_knows_as_revoked_stays_revoked(revoked_in_backup: bool) -> None:
    good, bad = (system(**{keys.KEYS: {"app": msgspec.json.encode(key("app", revoked=at))}}) for at in (0, 9))
    known, backup = (good, bad) if revoked_in_backup else (bad, good)
    assert msgspec.json.decode(merged(known, backup)[keys.KEYS]["app"], type=KeyRecord).revoked_unix_ms == 9


rotated = st.tuples(st.sampled_from([5, 9]), st.sampled_from([0, 20, 30]))
records = st.builds(
    lambda times, revoked: key("app", at=times[0], ends=times[1], revoked=revoked),
    st.just((1, 0)) | rotated, st.sampled_from([0, 7, 8]),
)  # fmt: skip


@given(records, records)
def test_no_credential_that_either_refuses_is_good_again(one: KeyRecord, other: KeyRecord) -> None:
    after = joined_key(one, other)
    newest = max(one.credentials[0].created_unix_ms, other.credentials[0].created_unix_ms)
    assert bool(after.revoked_unix_ms) == bool(one.revoked_unix_ms or other.revoked_unix_ms)
    assert after.credentials[0].created_unix_ms == newest
    for record in (one, other):
        for credential in record.credentials:
            ends = next((c.expires_unix_ms for c in after.credentials if c.id == credential.id), 1)
            assert not credential.expires_unix_ms or 0 < ends <= credential.expires_unix_ms


def test_numbers_of_versions_stay_taken_and_what_was_removed_stays_removed() -> None:
    known: dict[str, Any] = {
        keys.FUNCTIONS: {"hello": function("hello", 4), "later": function("later", 3)},
        HELLO: {"2": version("hello", 2, code="b"), "4": version("hello", 4)},
        keys.versions(FunctionName("later")): {"3": version("later", 3)},
        keys.FUNCTIONS_LAST: {"gone": b"9"},
    }
    after = merged(known, system())
    assert after[keys.FUNCTIONS_LAST] == {"gone": b"9", "hello": b"4", "later": b"3"}
    assert after[keys.FUNCTIONS] == system()[keys.FUNCTIONS]
    assert {*after[HELLO]} == {"1", "2", "4"}, "versions are never lost"
    assert removed_keys(known, after) == [keys.versions(FunctionName("later"))]


def test_versions_of_an_earlier_function_of_the_name_stay_gone() -> None:
    backup = system(**{keys.FUNCTIONS: {"hello": function("hello", 2, first=2)}, HELLO: {"2": version("hello", 2)}})
    after = merged({HELLO: {"1": version("hello", 1)}, keys.FUNCTIONS: {"hello": function("hello", 1)}}, backup)
    assert {*after[HELLO]} == {"2"}


def test_another_code_under_the_same_number_is_refused() -> None:
    with pytest.raises(Conflict, match="of different systems"):
        merged({HELLO: {"2": version("hello", 2, code="c")}}, system())


def test_rows_are_united_and_leave_the_stream_when_a_segment_has_them() -> None:
    first = segment(None, 10, 20)
    second = segment(first, 30)
    known: dict[str, Any] = {
        keys.LEDGER_SEGMENTS: {"1": first.line, "2": second.line},
        keys.LEDGER: dict([row(40), row(50)]),
        keys.LEDGER_HORIZON: {"": b"25"},
    }
    after = merged(known, system())
    assert [*after[keys.LEDGER]] == ["40-0", "50-0"]
    assert {*after[keys.LEDGER_SEGMENTS]} == {"1", "2"}
    assert after[keys.LEDGER_HORIZON] == {"": b"31"}, "ids of rows in segments are looked up there"


def test_a_ledger_of_another_system_is_refused() -> None:
    with pytest.raises(Conflict, match="of different systems"):
        merged({keys.LEDGER_SEGMENTS: {"1": segment(None, 11).line}}, system())


def test_numbers_of_volumes_stay_taken() -> None:
    def volume(last: int) -> dict[str, bytes]:
        record = VolumeRecord(name="v", project="default", last=last, created_unix_ms=1, created_by="t")
        return {keys.VOLUMES: {"v": msgspec.json.encode(record)}}  # type: ignore[dict-item]

    after = merged(volume(5), volume(3))  # type: ignore[arg-type]
    assert msgspec.json.decode(after[keys.VOLUMES]["v"], type=VolumeRecord).last == 5
