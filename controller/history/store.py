"""The history's cells in Redis: names of hashes and fields, one batch to write, a span to read.

One hash holds the minutes of an hour, or the hours of a day, of one function; a field belongs to one gateway, which
writes its whole count into it. So a repeated write changes nothing, gateways never write to each other's fields, and
their counts add up when they are read. Hashes expire; `series.CELLS` says when.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.decoding import UNDECODABLE

from .call_counts import CallCounts, decode, encode
from .series import CELLS, HistorySpan, Resolution

log = logging.getLogger(__name__)

ALL = ""
"""Stands for the name of a function: the counts of all of them, removed ones too."""
CELLS_AT_ONCE = 100
"""Cells written in one round trip: a few milliseconds, then the event loop serves calls."""
HASHES_AT_ONCE = 500
"""Hashes read in one round trip: about a megabyte."""


class Cell(NamedTuple):
    """One minute or one hour of a function."""

    function: str
    resolution: Resolution
    number: int
    """Minutes, or hours, since 1970."""

    @property
    def key(self) -> str:
        size = CELLS[self.resolution]
        return keys.history(self.resolution, self.function, self.number * size.cell_ms // size.hash_ms)

    @property
    def begin_unix_ms(self) -> int:
        return self.number * CELLS[self.resolution].cell_ms

    @property
    def end_unix_ms(self) -> int:
        return self.begin_unix_ms + CELLS[self.resolution].cell_ms


class FoundCell(NamedTuple):
    """A cell that was read: one gateway's counts."""

    function: str
    begin_unix_ms: int
    counts: CallCounts


class HistoryStore:
    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    async def write(self, gateway: str, cells: Mapping[Cell, CallCounts], *, expire: Collection[Cell]) -> None:
        """Writes a gateway's own counts of the cells; hashes of `expire` get their expiry. Errors: REDIS_ERRORS."""
        fields = [(cell, encode(counts)) for cell, counts in cells.items()]
        for begin in range(0, len(fields), CELLS_AT_ONCE):
            async with self._client.pipeline(transaction=False) as pipe:
                for cell, value in fields[begin : begin + CELLS_AT_ONCE]:
                    pipe.hset(cell.key, f"{cell.number}:{gateway}", value)
                    if cell in expire:
                        pipe.expire(cell.key, CELLS[cell.resolution].kept_s)
                await pipe.execute()

    async def read(self, functions: Sequence[str], span: HistorySpan) -> list[FoundCell]:
        """The cells of the functions, of all hashes that the span touches. Errors: REDIS_ERRORS."""
        names = [(function, number) for function in functions for number in span.hashes]
        found: list[FoundCell] = []
        for begin in range(0, len(names), HASHES_AT_ONCE):
            async with self._client.pipeline(transaction=False) as pipe:
                part = names[begin : begin + HASHES_AT_ONCE]
                for function, number in part:
                    pipe.hgetall(keys.history(span.resolution, function, number))
                hashes: Any = await pipe.execute()
            for (function, _), fields in zip(part, hashes, strict=True):
                found += _decoded(function, fields, CELLS[span.resolution].cell_ms)
        return found


def _decoded(function: str, fields: Mapping[bytes, bytes], cell_ms: int) -> Iterable[FoundCell]:
    for field, value in fields.items():
        number, _, gateway = field.partition(b":")
        try:
            yield FoundCell(function, int(number) * cell_ms, decode(value))
        except (ValueError, *UNDECODABLE):
            log.warning("a cell of the history is not understood", extra={"gateway": gateway.decode(errors="replace")})
