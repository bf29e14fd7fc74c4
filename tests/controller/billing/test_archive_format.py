"""The segment format: what goes in comes out, and nothing that was changed comes out at all."""

from __future__ import annotations

import hashlib
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.billing.archive_format import (
    ROOT,
    EntryId,
    LedgerEntry,
    SegmentHeader,
    check_successor,
    decode_entry,
    pack,
    unpack,
)
from fleetstart.runtime.contract.errors import ChecksumMismatch
from tests.controller.billing.rows import call, phase

ids = st.lists(st.tuples(st.integers(0, 2**48), st.integers(0, 2**31)), min_size=1, max_size=20, unique=True).map(
    lambda pairs: [EntryId(*pair) for pair in sorted(pairs)]
)


def entries_of(names: list[EntryId]) -> list[LedgerEntry]:
    rows = [
        call(f"inv-{i}", cost=i) if i % 3 else phase(f"w/{i}", cost=i, tags={"team": "a b\n"})
        for i in range(len(names))
    ]
    return [decode_entry(str(name).encode(), msgspec.json.encode(row)) for name, row in zip(names, rows, strict=True)]


@given(ids)
def test_what_was_packed_comes_out(names: list[EntryId]) -> None:
    entries = entries_of(names)
    header, data = pack(entries, None)
    assert unpack(data, 1) == (header, entries)
    assert (header.sequence, header.previous, header.first_row, header.rows) == (1, ROOT, 1, len(names))
    assert header.cost_nusd == sum(entry.row.cost_nusd for entry in entries)


@given(ids, st.data())
def test_no_byte_can_be_changed_unnoticed(names: list[EntryId], data: st.DataObject) -> None:
    _, packed = pack(entries_of(names), None)
    at = data.draw(st.integers(0, len(packed) - 1))
    changed = packed[:at] + bytes([packed[at] ^ data.draw(st.integers(1, 255))]) + packed[at + 1 :]
    try:
        header, _ = unpack(changed, 1)
    except ChecksumMismatch:
        return
    # A header can say something else that is well formed; then it is another segment, and no successor names it.
    assert header.checksum != pack(entries_of(names), None)[0].checksum


@given(ids, st.data())
def test_a_segment_that_was_cut_is_refused(names: list[EntryId], data: st.DataObject) -> None:
    _, packed = pack(entries_of(names), None)
    with pytest.raises(ChecksumMismatch):
        unpack(packed[: data.draw(st.integers(0, len(packed) - 1))], 1)


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"{}\n", b"[" * 3000 + b"\n", b"\x00" * 5000, b'{"format":1}\nx', b"null\n", "é\n".encode("latin-1")],
)
def test_what_is_no_segment_is_refused_in_words(data: bytes) -> None:
    with pytest.raises(ChecksumMismatch, match="segment 7 of the ledger cannot be trusted"):
        unpack(data, 7)


def test_a_body_that_inflates_without_end_is_refused() -> None:
    header, _ = pack(entries_of([EntryId(1, 0)]), None)
    bomb = zlib.compress(b"\n" * (24 << 20))
    forged = msgspec.structs.replace(header, body_bytes=len(bomb), body_sha256=hashlib.sha256(bomb).hexdigest())
    with pytest.raises(ChecksumMismatch, match="does not end where it should"):
        unpack(forged.line + bomb, 1)


def chain(*counts: int) -> list[SegmentHeader]:
    found: list[SegmentHeader] = []
    at = 0
    for count in counts:
        header, _ = pack(entries_of([EntryId(at + i, 0) for i in range(count)]), found[-1] if found else None)
        found.append(header)
        at += count
    return found


def test_segments_name_each_other_and_count_on() -> None:
    first, second, third = chain(3, 2, 4)
    assert (second.sequence, second.previous, second.first_row) == (2, first.checksum, 4)
    assert (third.sequence, third.previous, third.first_row) == (3, second.checksum, 6)
    check_successor(first, None)
    check_successor(third, second)


@pytest.mark.parametrize(
    "change",
    [{"sequence": 4}, {"previous": ROOT}, {"first_row": 5}, {"first_entry": "4-0"}],
    ids=["number", "predecessor", "row", "entry"],
)
def test_a_segment_that_does_not_go_on_is_refused(change: dict[str, object]) -> None:
    _, second, third = chain(3, 2, 4)
    with pytest.raises(ChecksumMismatch):
        check_successor(msgspec.structs.replace(third, **change), second)
