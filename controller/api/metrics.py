"""Handlers of `/metrics`, of the dashboard's files, and of the recent activity that the dashboard shows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, cast

import msgspec
import redis.asyncio as redis
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import NotFound
from fleetstart.runtime.contract.ids import FunctionName

from ..auth.request_context import caller_of
from ..billing.archive_format import EntryId
from ..billing.budgets import DAY_S
from ..billing.ledger_reader import LedgerReader
from ..observability.activity import WINDOW_MS, ActivityWindow
from ..observability.call_metrics import CallMetrics
from ..observability.cluster_metrics import WorkerFailures, families
from ..observability.process_metrics import LoopLag, ProcessMetrics
from ..observability.prometheus import CONTENT_TYPE, MetricFamily, render, visible
from ..schemas.functions import BudgetInfo
from ..state.view import View

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "; ".join(
    (
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'",
        "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'",
    )
)  # fmt: skip
"""Content security policy of the dashboard: its own files only, and no text that becomes code."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
CHUNK_ROWS = 500
SPENT_FIELDS_AT_ONCE = 500


class ObservabilityApi:
    """Serves metrics, dashboard and activity. `extra` gives metric families that other parts count themselves."""

    def __init__(
        self,
        client: redis.Redis,
        reader: LedgerReader,
        view: View,
        *,
        calls: CallMetrics,
        lag: LoopLag,
        process: ProcessMetrics,
        budgets: Callable[[], list[BudgetInfo]],
        extra: Callable[[], Iterable[MetricFamily]] = lambda: (),
    ) -> None:
        self._client = client
        self._reader = reader
        self._view = view
        self._calls = calls
        self._lag = lag
        self._process = process
        self._budgets = budgets
        self._extra = extra
        self._failures = WorkerFailures(view)
        self._recent = ActivityWindow()
        self._last = EntryId(0, 0)
        self._reading = asyncio.Lock()
        self._files = _dashboard()

    async def metrics(self, request: Request) -> Response:
        view = self._view
        own = self._calls.families(view.functions if view.synced else None)
        world = families(view, self._budgets(), time.time_ns() // 1_000_000, time.monotonic_ns())
        own += [*self._failures.families(), self._lag.family(), *self._extra(), *self._process.families()]
        shown = [*own, *world]
        caller = caller_of(request)
        if caller.limited:
            shown = visible(shown, caller.sees)
        text = bytearray()
        for family in shown:
            text += render([family])
            await asyncio.sleep(0)  # of thousands of workers one has thousands of lines: calls have their turn
        return Response(bytes(text), headers={"content-type": CONTENT_TYPE})

    # ── the dashboard ──────────────────────────────────────────────────────────────────────────────

    async def home(self, request: Request) -> Response:
        return RedirectResponse("/ui/", status_code=302)

    async def file(self, request: Request) -> Response:
        name = request.path_params["file"] or "index.html"
        found = self._files.get(name)
        if found is None:
            raise NotFound(f"the dashboard has no file {name[:80]}", hint="it is at /ui/")
        kind, content = found
        return Response(content, headers={**HEADERS, "content-type": f"{kind}; charset=utf-8"})

    async def activity(self, request: Request) -> Response:
        """The activity of the last minutes, by function that the caller may see."""
        now_unix_ms = time.time_ns() // 1_000_000
        async with self._reading:
            await self._read(now_unix_ms)
            today = await self._spent_today(now_unix_ms)
            found = self._recent.result(now_unix_ms, today)
        sees = caller_of(request).sees
        found = msgspec.structs.replace(found, functions=[one for one in found.functions if sees(one.function)])
        return Response(msgspec.json.encode(found), media_type="application/json")

    async def _read(self, now_unix_ms: int) -> None:
        """Reads the ledger's rows since the last read, or of the window."""
        since_unix_ms = max(self._last.unix_ms, now_unix_ms - WINDOW_MS)
        async for page in self._reader.entries(since_unix_ms):
            for begin in range(0, len(page), CHUNK_ROWS):
                new = [entry for entry in page[begin : begin + CHUNK_ROWS] if entry.id > self._last]
                self._recent.add(new)
                self._last = new[-1].id if new else self._last
                await asyncio.sleep(0)

    async def _spent_today(self, now_unix_ms: int) -> dict[FunctionName, int]:
        """Today's cost by function; those that cost nothing are left out."""
        day, names = now_unix_ms // (DAY_S * 1000), list(self._view.functions)
        found: dict[FunctionName, int] = {}
        for begin in range(0, len(names), SPENT_FIELDS_AT_ONCE):
            part = names[begin : begin + SPENT_FIELDS_AT_ONCE]
            asked = cast(Awaitable[Any], self._client.hmget(keys.LEDGER_SPENT, [f"{day}:{name}" for name in part]))
            found |= {name: int(cost) for name, cost in zip(part, await asked, strict=True) if cost}
        return found


def _dashboard() -> dict[str, tuple[str, bytes]]:
    """Reads the dashboard's files: media type and content by path."""
    return dict(_files(files("fleetstart.controller").joinpath("dashboard"), ""))


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, tuple[str, bytes]]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{prefix}{entry.name}/")
            continue
        kind = TYPES.get(entry.name[entry.name.rfind(".") :])
        if kind is not None:
            yield f"{prefix}{entry.name}", (kind, entry.read_bytes())
