"""Handlers of the history: counts of calls over a range of time, and events."""

from __future__ import annotations

from collections.abc import Sequence

import redis.asyncio as redis
from starlette.requests import Request
from starlette.responses import Response

from fleetstart.runtime.contract.errors import NotFound
from fleetstart.runtime.contract.ids import FunctionName

from ..auth.audit_log import AuditLog
from ..auth.authorize import Caller
from ..auth.request_context import caller_of, query_function
from ..http.json_api import json_response, now_unix_ms, query_int
from ..schemas.history import FunctionTotal
from ..state.view import View
from .call_counts import CallCounts
from .events import EventReader, visible_events
from .series import DAY_MS, HOUR_MS, history_of, moment_of, span_of
from .store import ALL, HistoryStore

RANGE = "24h"
EVENTS = 200
EVENTS_MAX = 1_000
EVENTS_DAYS = 32
"""How far back events are read, as far as counts are kept: the audit log has no end."""
FUNCTIONS_MAX = 500
"""Functions that are added up over a range for a limited key, each with up to 31 hashes; an unlimited one reads one sum
of all. Of a single bar all are read."""
TIME_MAX_MS = 1 << 53


class HistoryApi:
    def __init__(self, client: redis.Redis, audit: AuditLog, view: View) -> None:
        self._store = HistoryStore(client)
        self._events = EventReader(client, audit)
        self._view = view

    async def history(self, request: Request) -> Response:
        """The calls of one function, or of all that the caller may see."""
        function, caller = query_function(request), caller_of(request)
        query = request.query_params
        span = span_of(query.get("range") or RANGE, query.get("step", ""), now_unix_ms())
        if function is not None:
            caller.require(function, self._view.functions)
        cells = await self._store.read([function] if function else self._seen(caller), span)
        found = history_of(function or "", span, ((cell.begin_unix_ms, cell.counts) for cell in cells))
        if function is not None and function not in self._view.functions and not found.total.calls:
            raise NotFound(f"function {function[:127]} does not exist", hint="`fs ls` lists what does")
        return json_response(found)

    def _seen(self, caller: Caller) -> Sequence[str]:
        return self._functions(caller)[:FUNCTIONS_MAX] if caller.limited else [ALL]

    def _functions(self, caller: Caller) -> list[FunctionName]:
        return sorted(filter(caller.sees, self._view.functions))

    async def functions(self, request: Request) -> Response:
        """The calls of a span by function, those with the most failures first. Functions without calls are left out."""
        now = now_unix_ms()
        since_unix_ms = query_int(request, "since_unix_ms", max(0, now - HOUR_MS), TIME_MAX_MS)
        until_unix_ms = query_int(request, "until_unix_ms", now, TIME_MAX_MS)
        span = moment_of(since_unix_ms, until_unix_ms, now)
        by_function: dict[str, CallCounts] = {}
        for function, begin_unix_ms, counts in await self._store.read(self._functions(caller_of(request)), span):
            if since_unix_ms <= begin_unix_ms < until_unix_ms:
                by_function.setdefault(function, CallCounts()).merge(counts)
        found = [FunctionTotal(function=name, total=sums.point(since_unix_ms)) for name, sums in by_function.items()]
        return json_response(sorted(found, key=lambda one: (-one.total.failed, -one.total.calls, one.function)))

    async def events(self, request: Request) -> Response:
        """The newest events of a span, of one function or of all that the caller may see."""
        function, caller = query_function(request), caller_of(request)
        if function is not None:
            caller.require(function, self._view.functions)
        now = now_unix_ms()
        until_unix_ms = query_int(request, "until_unix_ms", now + 1, TIME_MAX_MS)
        since_unix_ms = query_int(request, "since_unix_ms", max(0, until_unix_ms - DAY_MS), TIME_MAX_MS)
        since_unix_ms = max(since_unix_ms, now - EVENTS_DAYS * DAY_MS)
        limit = query_int(request, "limit", EVENTS, EVENTS_MAX)
        found = await self._events.events(since_unix_ms, until_unix_ms) if since_unix_ms < until_unix_ms else []
        return json_response(visible_events(found, function or "", caller.sees, limited=caller.limited)[:limit])
