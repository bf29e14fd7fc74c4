"""The format of an archived ledger segment: some thousand rows, immutable, chained by checksums.

    header     one line of JSON: SegmentHeader
    body       zlib; then a line a row: the entry's id, a space, the row's JSON as it was written

A segment's checksum is the sha256 of its header line, which has the sha256 of the body. Its header names its
predecessor's checksum, so the last header authenticates every row there ever was. Numbers count from 1 without a gap,
segments as well as rows. `archive_store` stores segments, `compactor` makes them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from fleetstart.runtime.contract.billing.ledger import LedgerRow, began_unix_ms
from fleetstart.runtime.contract.errors import ChecksumMismatch

FORMAT = 1
SEGMENT_BYTES = 8 << 20
"""Size of a segment's rows before compression."""
SEGMENT_MAX_BYTES = 2 * SEGMENT_BYTES
"""Maximum size of a segment; larger objects are rejected."""
HEADER_MAX_BYTES = 4096
ROOT = "0" * 64
"""The predecessor's checksum in the first segment."""


class EntryId(NamedTuple):
    """The id of a booked row: the time by Redis' clock, and a number within the millisecond. Later entries are
    larger."""

    unix_ms: int
    number: int

    def __str__(self) -> str:
        return f"{self.unix_ms}-{self.number}"


def parse_entry(text: str | bytes) -> EntryId:
    """Parses an entry id. Errors: ValueError."""
    unix_ms, _, number = (text.decode() if isinstance(text, bytes) else text).partition("-")
    return EntryId(int(unix_ms), int(number))


class LedgerEntry(NamedTuple):
    """A booked row."""

    id: EntryId
    raw: bytes
    row: LedgerRow


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of a segment: its place in the chain, and what its body must match."""

    format: int = FORMAT
    sequence: int
    previous: str
    """Checksum of the segment before; ROOT in the first."""
    first_row: int
    """The number of its first row, counted over all segments from 1."""
    rows: int
    first_entry: str
    last_entry: str
    """Ids of its first and last entry: it has all entries between them."""
    first_unix_ms: int
    last_unix_ms: int
    """Earliest and latest of the rows' own times (`began_unix_ms`)."""
    cost_nusd: int
    body_bytes: int
    body_sha256: str

    @property
    def line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.line).hexdigest()

    @property
    def first(self) -> EntryId:
        return parse_entry(self.first_entry)

    @property
    def last(self) -> EntryId:
        return parse_entry(self.last_entry)


def decode_entry(entry_id: bytes, raw: bytes) -> LedgerEntry:
    """Decodes an entry of the stream. Errors: msgspec.DecodeError, ValueError."""
    return LedgerEntry(parse_entry(entry_id), raw, _ROWS.decode(raw))


def pack(entries: Sequence[LedgerEntry], after: SegmentHeader | None) -> tuple[SegmentHeader, bytes]:
    """Makes the segment that follows another (None: the first) from at least one entry. Returns its header and
    bytes."""
    body = zlib.compress(b"".join(b"%s %s\n" % (str(entry.id).encode(), entry.raw) for entry in entries), 6)
    times = [began_unix_ms(entry.row) for entry in entries]
    header = SegmentHeader(
        sequence=after.sequence + 1 if after is not None else 1,
        previous=after.checksum if after is not None else ROOT,
        first_row=after.first_row + after.rows if after is not None else 1,
        rows=len(entries),
        first_entry=str(entries[0].id),
        last_entry=str(entries[-1].id),
        first_unix_ms=min(times),
        last_unix_ms=max(times),
        cost_nusd=sum(entry.row.cost_nusd for entry in entries),
        body_bytes=len(body),
        body_sha256=hashlib.sha256(body).hexdigest(),
    )
    return header, header.line + body


def unpack(data: bytes, sequence: int) -> tuple[SegmentHeader, list[LedgerEntry]]:
    """Decodes a segment and verifies it against its header. Errors: ChecksumMismatch."""
    header, body = _split(data, sequence)
    if len(body) != header.body_bytes or hashlib.sha256(body).hexdigest() != header.body_sha256:
        raise _wrong(sequence, f"its body has {len(body):,} bytes that are not the {header.body_bytes:,} promised")
    try:
        entries = list(_entries(body))
    except (zlib.error, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise _wrong(sequence, f"its body is not understood: {error}") from error
    ids = [entry.id for entry in entries]
    if not ids or ids != sorted(set(ids)) or (str(ids[0]), str(ids[-1])) != (header.first_entry, header.last_entry):
        raise _wrong(sequence, f"its entries do not lead from {header.first_entry} to {header.last_entry}")
    if len(entries) != header.rows or sum(entry.row.cost_nusd for entry in entries) != header.cost_nusd:
        raise _wrong(sequence, f"its {len(entries):,} rows are not the {header.rows:,} promised, or cost else")
    return header, entries


def check_successor(header: SegmentHeader, after: SegmentHeader | None) -> None:
    """Checks that a segment directly follows another. Errors: ChecksumMismatch."""
    sequence, checksum, row = (
        (after.sequence + 1, after.checksum, after.first_row + after.rows) if after is not None else (1, ROOT, 1)
    )
    if (header.sequence, header.previous, header.first_row) != (sequence, checksum, row):
        raise _wrong(header.sequence, f"it does not go on after segment {sequence - 1} with row {row:,}")
    if after is not None and header.first <= after.last:
        raise _wrong(header.sequence, f"its first entry {header.first_entry} is not after {after.last_entry}")


def decode_header(line: bytes, sequence: int) -> SegmentHeader:
    """Decodes and checks a header. Errors: ChecksumMismatch."""
    try:
        header = msgspec.json.decode(line, type=SegmentHeader)
        first, last = header.first, header.last
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _wrong(sequence, f"its header is not understood: {error}") from error
    if header.format != FORMAT or header.sequence != sequence:
        raise _wrong(sequence, f"its header is of segment {header.sequence}, format {header.format}")
    if header.rows < 1 or header.first_row < 1 or first > last or header.line != line:
        raise _wrong(sequence, "its header contradicts itself")
    return header


def _split(data: bytes, sequence: int) -> tuple[SegmentHeader, bytes]:
    end = data.find(b"\n", 0, HEADER_MAX_BYTES) + 1
    if not end:
        raise _wrong(sequence, f"no header in the first {HEADER_MAX_BYTES} of its {len(data):,} bytes")
    return decode_header(data[:end], sequence), data[end:]


def _entries(body: bytes) -> Iterator[LedgerEntry]:
    inflate = zlib.decompressobj()
    text = inflate.decompress(body, SEGMENT_MAX_BYTES)
    if not inflate.eof or inflate.unused_data:
        raise ValueError("it does not end where it should")
    if text[-1:] != b"\n":
        raise ValueError("its last line is cut")
    for line in text[:-1].split(b"\n"):
        entry_id, _, raw = line.partition(b" ")
        yield decode_entry(entry_id, raw)


def _wrong(sequence: int, what: str) -> ChecksumMismatch:
    return ChecksumMismatch(
        f"segment {sequence} of the ledger cannot be trusted: {what}",
        hint="restore the object ledger/ of that number from a copy of the store",
    )


_ROWS: msgspec.json.Decoder[LedgerRow] = msgspec.json.Decoder(LedgerRow)
