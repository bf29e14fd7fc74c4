"""The file of a backup: read back as it was written; damaged, cut off and hostile ones are refused."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.backup.file import VERSION, BackupHeader, BackupInvalid, pack, unpack, write
from fleetstart.controller.backup.tables import State, masters, require_whole, unreadable
from fleetstart.controller.state.redis_server.schema import SCHEMA
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import FleetError
from tests.controller.backup.states import system

HEADER = BackupHeader(created_unix_ms=1, release="0.1", masters=["m1"])
WHOLE = pack(HEADER, system())

fields = st.dictionaries(st.text(max_size=9), st.binary(max_size=40), min_size=1, max_size=5)
states = st.dictionaries(st.sampled_from([keys.KEYS, keys.FUNCTIONS, keys.LEDGER, "fs:versions:a"]), fields)


def signed(*lines: object) -> bytes:
    """A file with a right checksum, whatever its lines are."""
    body = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    end = {"records": body.count(b"\n") - 1, "sha256": hashlib.sha256(body).hexdigest()}
    return gzip.compress(body + json.dumps(end).encode() + b"\n")


@given(states)
def test_what_was_packed_comes_out(state: State) -> None:
    assert unpack(pack(HEADER, state)) == (HEADER, state)


def test_a_system_comes_out_and_can_be_restored() -> None:
    header, state = unpack(WHOLE)
    require_whole(state)
    assert (header, state) == (HEADER, system())
    assert masters(state) == ["m1"]


@given(st.data())
def test_no_byte_can_be_changed_unnoticed(data: st.DataObject) -> None:
    at = data.draw(st.integers(10, len(WHOLE) - 1))  # gzip's own header says nothing of what is in the file
    damaged = bytearray(WHOLE)
    damaged[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BackupInvalid):
        unpack(bytes(damaged))


@given(st.integers(0, len(WHOLE) - 1))
def test_a_file_that_was_cut_is_refused(length: int) -> None:
    with pytest.raises(BackupInvalid):
        unpack(WHOLE[:length])


@given(st.binary(max_size=200))
def test_what_is_no_backup_is_refused_in_words(data: bytes) -> None:
    for raw in (data, gzip.compress(data), signed(data)):
        with pytest.raises(BackupInvalid):
            unpack(raw)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([{"format": "tar"}], "no backup"),
        ([["fs:keys", "a", "{}"]], "no backup"),
        ([HEADER_NEW := {**msgspec.to_builtins(HEADER), "schema": SCHEMA + 1}], "by a later release (0.1)"),
        ([{**HEADER_NEW, "schema": SCHEMA, "version": VERSION + 1}], "by a later release"),
        ([msgspec.to_builtins(HEADER), ["fs:leader", "", "me"]], "belongs to no backup"),
        ([msgspec.to_builtins(HEADER), ["fs:versions:../x", "1", "{}"]], "belongs to no backup"),
        ([msgspec.to_builtins(HEADER), ["fs:keys", "a"]], "record 1 is not understood"),
        ([msgspec.to_builtins(HEADER), ["fs:keys", "a", "!", "base64"]], "record 1 is not understood"),
        ([msgspec.to_builtins(HEADER), *[["fs:keys", "a", "{}"]] * 2], "stands there twice"),
    ],
)  # fmt: skip
def test_hostile_files_are_refused_in_words(lines: list[object], sentence: str) -> None:
    with pytest.raises(BackupInvalid, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        unpack(signed(*lines))


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        (keys.KEYS, "app", b'{"name":"other","rights":[],"credentials":[],"created_unix_ms":1,"created_by":"x"}'),
        (keys.KEYS, "app", b"{"),
        (keys.FUNCTIONS_LAST, "a", b"-1"),
        (keys.FUNCTIONS_LAST, "a", b"9" * 30),
        (keys.LEDGER, "0-0", b"{}"),
        (keys.LEDGER, "*", b"{}"),
        (keys.LEDGER, "99999999999999999999-1", b"{}"),
        (keys.LEDGER_SEGMENTS, "x", b"{}"),
        (keys.FENCE, "x", b"1"),
        (keys.FUNCTIONS, "lonely", b'{"name":"lonely","live":1,"deployed_unix_ms":1}'),
        (keys.LEDGER_SEGMENTS, "3", b"{}"),
    ],
)
def test_records_that_would_do_harm_are_refused(key: str, field: str, value: bytes) -> None:
    state = system()
    state[key] = {**state.get(key, {}), field: value}
    with pytest.raises(FleetError):
        require_whole(unpack(pack(HEADER, state))[1])
    assert unreadable(state) or field == "lonely"


def test_a_file_that_unpacks_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetstart.controller.backup.file.LINE_MAX", 1 << 20)
    bomb = gzip.compress(msgspec.json.encode(HEADER) + b"\n" + b"0" * (8 << 20))
    with pytest.raises(BackupInvalid, match="more than a backup can have"):
        unpack(bomb)


def test_a_file_is_for_its_owner_alone_and_nothing_is_left_of_a_failed_one(tmp_path: Path) -> None:
    write(tmp_path / "b", WHOLE)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="No such file"):
        write(tmp_path / "missing" / "b", WHOLE)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
