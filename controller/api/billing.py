"""Handlers of usage, invoices, ledger rows, prices and budgets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any, TypeVar

import msgspec
import redis.asyncio as redis
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.prices import LEAD_MS, PriceSheet, check_next, read_sheets
from fleetstart.runtime.contract.errors import InvalidInput, NotFound
from fleetstart.runtime.contract.ids import FunctionName

from ..auth.request_context import caller_of, query_function, set_audit_change
from ..billing.archive_format import LedgerEntry
from ..billing.budget_watch import BudgetWatch
from ..billing.budgets import BudgetState, budget_of, period_at
from ..billing.group_sums import Sums, sum_rows
from ..billing.ledger_reader import LedgerReader
from ..billing.stored_sums import StoredSums
from ..billing.usage import InvoiceSums, UsageSums, month_span, parse_by
from ..http.json_api import json_body, json_response, now_unix_ms, query_int
from ..schemas.functions import BudgetInfo, BudgetTerms, LedgerLine, NewPrices
from ..state.view import View

CHUNK_ROWS = 1000
"""Rows, or sums of rows, that are summed at a time: a millisecond or two, then the loop serves calls."""
TIME_MAX_MS = 1 << 53

Kind = TypeVar("Kind", bound=msgspec.Struct)


class BillingApi:
    def __init__(
        self, client: redis.Redis, reader: LedgerReader, sums: StoredSums, watch: BudgetWatch, view: View
    ) -> None:
        self._client = client
        self._stored_sums = sums
        self._reader = reader
        self._watch = watch
        self._view = view

    def shown(self) -> list[BudgetInfo]:
        """The budgets' state as last read from Redis."""
        return [state.info() for state in self._watch.states]

    # ── sums ───────────────────────────────────────────────────────────────────────────────────────

    async def usage(self, request: Request) -> Response:
        since_unix_ms, until_unix_ms = _span(request)
        sums = UsageSums(by=parse_by(request.query_params.get("by", "")), function=query_function(request))
        async for chunk in self._sums(request, since_unix_ms, until_unix_ms, by_parent=sums.by_parent):
            sums.add(chunk)
        return json_response(sums.result(since_unix_ms, until_unix_ms))

    async def invoice(self, request: Request) -> Response:
        month = request.path_params["month"]
        since_unix_ms, until_unix_ms = month_span(month)
        sums = InvoiceSums(function=query_function(request))
        async for chunk in self._sums(request, since_unix_ms, until_unix_ms):
            sums.add(chunk)
        headers = await self._reader.headers()
        return json_response(
            sums.result(
                month,
                complete=until_unix_ms <= now_unix_ms(),
                segments=len(headers),
                checksum=headers[-1].checksum if headers else "",
            )
        )

    async def ledger(self, request: Request) -> Response:
        function, span = query_function(request), _span(request)

        async def lines() -> AsyncIterator[bytes]:
            async for chunk in self._chunks(request, *span):
                yield b"".join(
                    msgspec.json.encode(LedgerLine(entry=str(entry.id), row=entry.row)) + b"\n"
                    for entry in chunk
                    if function in (None, entry.row.function)
                )

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def _sums(
        self, request: Request, since_unix_ms: int, until_unix_ms: int, *, by_parent: bool = False
    ) -> AsyncIterator[Sums]:
        """Yields sums of the ledger's rows of functions that the caller may see."""
        if by_parent:  # stored sums are not by parent
            async for chunk in self._chunks(request, since_unix_ms, until_unix_ms):
                yield sum_rows(chunk, by_parent=True).items()
            return
        caller = caller_of(request)
        async for sums in self._stored_sums.read(since_unix_ms, until_unix_ms):
            left = iter(sums)
            while some := list(islice(left, CHUNK_ROWS)):
                yield [one for one in some if caller.sees(one[0].function)]
                await asyncio.sleep(0)

    async def _chunks(
        self, request: Request, since_unix_ms: int, until_unix_ms: int
    ) -> AsyncIterator[list[LedgerEntry]]:
        """Yields the ledger's rows of functions that the caller may see."""
        caller = caller_of(request)
        async for page in self._reader.entries(since_unix_ms, until_unix_ms):
            for begin in range(0, len(page), CHUNK_ROWS):
                chunk = page[begin : begin + CHUNK_ROWS]
                yield [entry for entry in chunk if caller.sees(entry.row.function)] if caller.limited else chunk
                await asyncio.sleep(0)

    # ── prices ─────────────────────────────────────────────────────────────────────────────────────

    async def prices(self, request: Request) -> Response:
        return json_response(await self._sheets())

    async def add_prices(self, request: Request) -> Response:
        """Adds a price sheet. Of two concurrent requests one is rejected."""
        new = await json_body(request, NewPrices)
        sheets, now = await self._sheets(), now_unix_ms()
        sheet = PriceSheet(
            version=sheets[-1].version + 1,
            from_unix_ms=now + LEAD_MS if new.from_unix_ms is None else new.from_unix_ms,
            execute_nusd_per_gib_s=new.execute_nusd_per_gib_s,
            idle_nusd_per_gib_s=new.idle_nusd_per_gib_s,
            device_nusd_per_gib_s={**sheets[-1].device_nusd_per_gib_s, **new.device_nusd_per_gib_s},
        )
        check_next(sheets, sheet, now)
        if not await self._client.hsetnx(keys.PRICES, str(sheet.version), msgspec.json.encode(sheet)):
            raise InvalidInput(f"price sheet {sheet.version} was added concurrently", hint="read the prices again")
        await self._watch.read()
        set_audit_change(request, sheets[-1], sheet)
        return json_response(sheet, status=201)

    async def _sheets(self) -> list[PriceSheet]:
        raw: Any = await self._client.hvals(keys.PRICES)
        return read_sheets(raw)

    # ── budgets ────────────────────────────────────────────────────────────────────────────────────

    async def budgets(self, request: Request) -> Response:
        await self._watch.read()
        return json_response([info for info in self.shown() if caller_of(request).sees(info.function)])

    async def set_budget(self, request: Request) -> Response:
        name = FunctionName(request.path_params["function"])
        if self._view.synced and name not in self._view.functions:
            raise NotFound(f"function {name[:127]} does not exist", hint="`fs ls` lists what does")
        budget = budget_of(name, await json_body(request, BudgetTerms))
        before = await self._read(name)
        await self._client.hset(keys.BUDGETS, name, msgspec.json.encode(budget))
        set_audit_change(request, before.budget if before is not None else None, budget)
        state = await self._read(name) or BudgetState(budget, period_at(budget.per, now_unix_ms()), 0)
        return json_response(state.info())

    async def remove_budget(self, request: Request) -> Response:
        name = FunctionName(request.path_params["function"])
        known = await self._read(name)
        if known is None:
            raise NotFound(f"function {name[:127]} has no budget", hint="`fs budget ls` lists those that have one")
        await self._client.hdel(keys.BUDGETS, name)
        set_audit_change(request, known.budget, None)
        await self._watch.read()
        return json_response(known.info())

    async def _read(self, name: FunctionName) -> BudgetState | None:
        """Reads all budgets from Redis; returns that of a function."""
        await self._watch.read()
        return next((state for state in self._watch.states if state.budget.function == name), None)


def _span(request: Request) -> tuple[int, int]:
    """The requested time span, by default all until now. The last millisecond may still be written. Errors:
    InvalidInput for one whose sum would be 0 whatever was spent."""
    since_ms = query_int(request, "since_unix_ms", 0, TIME_MAX_MS)
    until_ms = query_int(request, "until_unix_ms", now_unix_ms() + 1, TIME_MAX_MS)
    if since_ms > until_ms and "until_unix_ms" in request.query_params:
        raise InvalidInput("the time span ends before it begins", hint="since is the earlier time, until the later one")
    return since_ms, until_ms
