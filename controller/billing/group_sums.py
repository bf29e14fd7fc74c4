"""Sums of the ledger's rows by all that a bill tells rows apart by, and their stored form. Pure, integers throughout.

A block of segments never changes, and neither does its sum: it is stored beside the segments, so that a bill of
millions of rows is added up from some dozens of sums. The first segment of a block follows a multiple of its size. A
sum is used only if its segments' headers agree: their checksum, their rows, their cost.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple, TypeVar

import msgspec

from fleetstart.runtime.contract.billing.ledger import InvocationRow, LedgerRow, PhaseRow
from fleetstart.runtime.contract.errors import ChecksumMismatch
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version

from ..state.access_records import DEFAULT
from .archive_format import LedgerEntry, SegmentHeader

BLOCK_SIZES = (32, 8, 1)
"""Numbers of segments of a block. A month of 10 million rows has a thousand segments: thirty blocks of the largest
size, and at its two ends at most six and fourteen of the others."""
SUM_MAX_BYTES = 64 << 20
"""Maximum size of a block's sum, before and after compression: some 300,000 groups."""
DAY_MS = 86_400_000

MEASURED: dict[str, Callable[[tuple[int, int]], int]] = {
    "cpu_ms": sum,
    "memory_peak_bytes": max,
    "received_bytes": sum,
    "sent_bytes": sum,
    "device_peak_bytes": max,
}
"""Columns of workers' rows that are for information, and how those of several rows are joined."""


Group = TypeVar("Group", bound=Hashable)


class RowGroup(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Columns that rows of one group have in common. It is no NamedTuple: Python's garbage collector looks at those,
    which took a third of the time of a bill."""

    function: FunctionName
    version: Version
    phase: str
    """`invocation`, or the phase of a worker's life."""
    project: str
    key: str
    caller: FunctionName
    parent: InvocationId
    """Empty unless groups are by parent: nearly each row has another one."""
    tags: tuple[tuple[str, str], ...]
    """Sorted by name."""
    day: int
    """The day (UTC) on which they were booked, counted from 1970."""
    price: int
    rate_nusd_per_gib_s: int
    device_type: str
    device_rate_nusd_per_gib_s: int


class GroupSum(msgspec.Struct, array_like=True, gc=False):
    """The sum of a group's rows."""

    rows: int = 0
    duration_ms: int = 0
    cost_nusd: int = 0
    device_byte_ms: int = 0
    measured: dict[str, int] = {}
    """Use of workers, by columns of MEASURED; without those that no row has."""

    def add(self, other: GroupSum) -> None:
        self.rows += other.rows
        self.duration_ms += other.duration_ms
        self.cost_nusd += other.cost_nusd
        self.device_byte_ms += other.device_byte_ms
        if other.measured:
            for name, value in other.measured.items():
                self._measure(name, value)

    def add_row(self, row: LedgerRow) -> None:
        length_ms = row.billed_ms if isinstance(row, InvocationRow) else row.duration_ms
        self.rows += 1
        self.duration_ms += length_ms
        self.cost_nusd += row.cost_nusd
        self.device_byte_ms += length_ms * row.device_bytes
        if isinstance(row, PhaseRow):
            for name in MEASURED:
                value: int | None = getattr(row, name)
                if value is not None:
                    self._measure(name, value)

    def _measure(self, name: str, value: int) -> None:
        known = self.measured.get(name)
        self.measured[name] = value if known is None else MEASURED[name]((known, value))


_NO_CALLER, _NO_PARENT = FunctionName(""), InvocationId("")
GroupSums = dict[RowGroup, GroupSum]
Sums = Iterable[tuple[RowGroup, GroupSum]]
"""Groups with their sums, to go through once. What was read from the store is no dictionary: none is needed to add it
up."""


def group_of(entry: LedgerEntry, *, by_parent: bool = False) -> RowGroup:
    row = entry.row
    if isinstance(row, InvocationRow):
        phase, key, caller = "invocation", row.key, row.caller
        parent = row.parent if by_parent else _NO_PARENT
    else:
        phase, key, caller, parent = row.phase, "", _NO_CALLER, _NO_PARENT
    return RowGroup(
        row.function,
        row.version,
        phase,
        row.project or DEFAULT,
        key,
        caller,
        parent,
        tuple(sorted(row.tags.items())) if row.tags else (),
        entry.id.unix_ms // DAY_MS,
        row.price,
        row.rate_nusd_per_gib_s,
        row.device_type,
        row.device_rate_nusd_per_gib_s,
    )


def sum_rows(entries: Iterable[LedgerEntry], *, by_parent: bool = False) -> GroupSums:
    sums: GroupSums = {}
    for entry in entries:
        group = group_of(entry, by_parent=by_parent)
        total = sums.get(group)
        if total is None:
            total = sums[group] = GroupSum()
        total.add_row(entry.row)
    return sums


def joined(parts: Iterable[Sums]) -> GroupSums:
    """The sum of several blocks."""
    sums: GroupSums = {}
    for part in parts:
        for group, one in part:
            add_to(sums, group, one)
    return sums


def add_to(sums: dict[Group, GroupSum], group: Group, one: GroupSum) -> None:
    """Adds a sum to that of its group."""
    total = sums.get(group)
    if total is None:
        total = sums[group] = GroupSum()
    total.add(one)


@lru_cache(maxsize=1024)
def day_name(day: int) -> str:
    return datetime.fromtimestamp(day * DAY_MS // 1000, UTC).strftime("%Y-%m-%d")


# ── blocks ─────────────────────────────────────────────────────────────────────────────────────────


class Block(NamedTuple):
    """Segments that follow one another, whose sum is stored."""

    first: int
    segments: int


def blocks(first: int, last: int) -> Iterator[Block]:
    """The fewest blocks that have all segments from the first number to the last, in their order."""
    while first <= last:
        block = next(one for one in _from(first) if first + one.segments - 1 <= last)
        yield block
        first += block.segments


def all_blocks(last: int) -> Iterator[Block]:
    """All blocks whose sums are stored once there are that many segments, the newest first, smaller ones before the
    larger one that has them."""
    for first in range(last, 0, -1):
        yield from (one for one in reversed(list(_from(first))) if first + one.segments - 1 <= last)


def _from(first: int) -> Iterator[Block]:
    """The blocks that begin with a segment, the largest first."""
    return (Block(first, size) for size in BLOCK_SIZES if (first - 1) % size == 0)


class _StoredSum(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    checksum: str
    """That of its last segment, which authenticates all segments up to it."""
    groups: list[RowGroup]
    sums: list[GroupSum]


def pack_sums(sums: Sums, headers: Sequence[SegmentHeader]) -> bytes:
    """The stored form of the sum of a block with these headers; empty if it has too many groups to be read at once."""
    pairs = list(sums)
    stored = _StoredSum(headers[-1].checksum, [group for group, _ in pairs], [one for _, one in pairs])
    text = msgspec.json.encode(stored)
    return zlib.compress(text, 1) if len(text) <= SUM_MAX_BYTES else b""


def unpack_sums(data: bytes, headers: Sequence[SegmentHeader]) -> Sums:
    """The sum of a block with these headers. Errors: ChecksumMismatch, if it is damaged or of other segments."""
    try:
        inflate = zlib.decompressobj()
        text = inflate.decompress(data, SUM_MAX_BYTES)
        if not inflate.eof or inflate.unused_data:
            raise ValueError("it does not end where it should")
        stored = _STORED.decode(text)
    except (zlib.error, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ChecksumMismatch(f"a sum of the ledger's rows is not understood: {error}") from error
    totals = (sum(one.rows for one in stored.sums), sum(one.cost_nusd for one in stored.sums))
    if len(stored.groups) != len(stored.sums) or totals != (
        sum(header.rows for header in headers),
        sum(header.cost_nusd for header in headers),
    ):
        raise ChecksumMismatch("a sum of the ledger's rows has other rows than its segments, or other cost")
    if stored.checksum != headers[-1].checksum:
        raise ChecksumMismatch("a sum of the ledger's rows is of other segments")
    return zip(stored.groups, stored.sums, strict=True)


_STORED = msgspec.json.Decoder(_StoredSum)
