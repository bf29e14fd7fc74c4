"""Reads what was recorded: invocations, traces, plans, logs. Only reads; sums of money are `billing`'s affair."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import InvocationRow, InvocationTrace
from fleetstart.runtime.contract.errors import NotFound
from fleetstart.runtime.contract.ids import FunctionName, InvocationId

from ..billing.ledger_reader import LedgerReader
from ..planner import Plan

SEARCHED_ROWS = 100_000
"""How far back a listing looks for a function's calls before it gives up."""
FOLLOW_BLOCK_MS = 1_000
"""Below the client's socket timeout, so that an idle follow is not taken for a dead Redis."""

Entries = list[tuple[bytes, dict[bytes, bytes]]]


class History:
    def __init__(self, client: redis.Redis, reader: LedgerReader) -> None:
        self._client = client
        self._reader = reader

    async def invocations(
        self, function: FunctionName | None, limit: int, sees: Callable[[str], bool]
    ) -> list[InvocationRow]:
        """The newest first, of functions that the caller sees."""
        found: list[InvocationRow] = []
        searched = 0
        async with aclosing(self._reader.newest()) as pages:
            async for page in pages:
                rows = [entry.row for entry in page]
                calls = (row for row in rows if isinstance(row, InvocationRow) and function in (None, row.function))
                found += [row for row in calls if sees(row.function)]
                searched += len(page)
                if len(found) >= limit or searched >= SEARCHED_ROWS:
                    break
        return found[:limit]

    async def trace(self, invocation: InvocationId) -> InvocationTrace:
        raw = await self._client.get(keys.trace(invocation))
        if raw is None:
            raise no_trace(invocation)
        return msgspec.json.decode(raw, type=InvocationTrace)

    async def plan(self, trace: InvocationTrace) -> Plan:
        """By which the worker that had the call was started. Errors: NotFound."""
        row = trace.row
        if not row.worker:
            raise NotFound(
                f"invocation {row.id} met no worker: HTTP {row.status} {row.error}".rstrip(),
                hint=f"nothing was started for it; `fs trace {row.id}` shows where it waited",
            )
        raw = await self._client.get(keys.plan(row.worker))
        if raw is None:
            how = "was ready already when it came" if row.start == "hot" else "was started for it"
            raise NotFound(
                f"the plan of worker {row.worker}, which {how}, is not kept any more",
                hint=f"plans are kept for a day after the start; `fs trace {row.id}` has the call's timeline",
            )
        return msgspec.json.decode(raw, type=Plan)

    async def logs(
        self, function: FunctionName, tail: int, *, follow: bool, stopping: asyncio.Event
    ) -> AsyncIterator[bytes]:
        """Lines (JSON, as the node wrote them), the last `tail` first; with follow, until the reader leaves."""
        key = keys.logs(function)
        page: Entries = []
        if tail > 0:
            page = await cast(Awaitable[Any], self._client.xrevrange(key, "+", "-", tail))
        last = page[0][0] if page else await self._last(key)
        yield b"".join(fields[b"line"] + b"\n" for _, fields in reversed(page))
        while follow and not stopping.is_set():
            answer = await cast(Awaitable[Any], self._client.xread({key: last}, count=500, block=FOLLOW_BLOCK_MS))
            for _, entries in answer.items() if isinstance(answer, dict) else answer or ():
                batch: Entries = entries[0] if entries and isinstance(entries[0], list) else entries
                last = batch[-1][0]
                yield b"".join(fields[b"line"] + b"\n" for _, fields in batch)

    async def _last(self, key: str) -> bytes:
        newest: Entries = await cast(Awaitable[Any], self._client.xrevrange(key, "+", "-", 1))
        return newest[0][0] if newest else b"0"


def no_trace(invocation: InvocationId) -> NotFound:
    return NotFound(f"invocation {invocation[:130]} has no trace", hint="traces are kept for a day")
