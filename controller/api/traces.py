"""Reads recorded invocations, their traces, and the plans of their workers' starts. Read-only.

`invocation_plan` sets a plan beside what was observed. Stored (async) invocations are in `invocations`, costs in
`billing`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import aclosing

import msgspec
import redis.asyncio as redis
from starlette.requests import Request
from starlette.responses import Response

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import InvocationRow, InvocationTrace, StartKind
from fleetstart.runtime.contract.errors import NotFound, StartFailed
from fleetstart.runtime.contract.ids import FunctionName, InvocationId
from fleetstart.runtime.contract.timeline import PhaseName, Timeline

from ..auth.request_context import caller_of, query_function
from ..billing.archive_format import LedgerEntry
from ..billing.ledger_reader import LedgerReader
from ..history.series import HOUR_MS, MINUTE_MS, span_of
from ..history.store import ALL, HistoryStore
from ..http.json_api import json_response, now_unix_ms, query_flag, query_int
from ..planner.accuracy_report import ObservedStart, explain
from ..planner.latency_model import cost_gib_s
from ..planner.plan import Plan
from ..schemas.functions import Prediction
from ..schemas.planning import InvocationPlan
from ..state.records import VersionKey
from ..state.view import View
from .functions import prediction_of
from .invocations import InvocationsApi

SEARCHED_ROWS = 100_000
"""Rows that a listing searches for a function's calls, at most."""
NEWEST_ROWS = 10_000
"""Newest rows in which a function's calls are looked for before the counts of its calls are read: in a small system
that is all, and in any the calls of the last moment, which are counted a second later."""
BOOKED_MS = 10_000
"""Time by which a call may be booked, by Redis' clock, before or after its gateway counted it by its own."""
GIVEN_SEARCHED_ROWS = 5_000
"""Newest rows in which an id is looked for that is no invocation's own: a look that a typing error costs, too."""
LIMIT = 20
LIMIT_MAX = 1_000
TIME_MAX_MS = 1 << 53
HOW: dict[StartKind, str] = {
    "hot": "was ready already when it came",
    "standby": "was woken for it",
    "warm": "was started for it",
    "cold": "was started for it",
}
"""What its worker was to a call."""
LEAST_EVENTS = 5
"""Events of a stream below which its time per token is not computed: most would be its first and its last."""


class History:
    """Reads rows from the ledger, traces and plans from Redis."""

    def __init__(self, client: redis.Redis, reader: LedgerReader) -> None:
        self._client = client
        self._reader = reader

    async def invocations(
        self,
        wanted: Callable[[InvocationRow], bool],
        limit: int,
        span_unix_ms: tuple[int, int | None] = (0, None),
        searched_rows: int = SEARCHED_ROWS,
    ) -> list[InvocationRow]:
        """Lists wanted invocations that were booked from the span's begin until just before its end, newest first."""
        since_unix_ms, until_unix_ms = span_unix_ms
        if until_unix_ms is not None:
            return (await self._within(wanted, limit, since_unix_ms, until_unix_ms, searched_rows))[0]
        found: list[InvocationRow] = []
        searched = 0
        async with aclosing(self._reader.newest()) as pages:
            async for page in pages:
                found += _calls((entry for entry in page if entry.id.unix_ms >= since_unix_ms), wanted)
                searched += len(page)
                if len(found) >= limit or searched >= searched_rows or page[-1].id.unix_ms < since_unix_ms:
                    break
        return found[:limit]

    async def latest(
        self, function: str, wanted: Callable[[InvocationRow], bool], limit: int, since_unix_ms: int
    ) -> list[InvocationRow]:
        """As `invocations`, of one function or of ALL. Calls may lie behind any number of rows, such as those that idle
        workers write: the counts of calls say in which minutes of the last day, and hours of a month, there are any."""
        found = await self.invocations(wanted, limit, (since_unix_ms, None), NEWEST_ROWS)
        known, left = {row.id for row in found}, SEARCHED_ROWS
        spans = await self._with_calls(function) if len(found) < limit else []
        for begin_unix_ms, end_unix_ms in spans:
            if len(found) >= limit or left <= 0 or end_unix_ms <= since_unix_ms:
                break
            begin_unix_ms, end_unix_ms = max(since_unix_ms, begin_unix_ms - BOOKED_MS), end_unix_ms + BOOKED_MS
            rows, searched = await self._within(wanted, limit, begin_unix_ms, end_unix_ms, left)
            found += [row for row in rows if row.id not in known]
            known, left = known | {row.id for row in rows}, left - searched
        return found[:limit]

    async def _with_calls(self, function: str) -> list[tuple[int, int]]:
        """Begin and end of each minute of the last day, and before it of each hour, that has calls; newest first."""
        minutes, hours = (span_of(name, "", now_unix_ms()) for name in ("24h", "30d"))
        counts = HistoryStore(self._client)
        found: dict[int, int] = {}
        for span, size_ms, ends_unix_ms in (
            (minutes, MINUTE_MS, minutes.until_unix_ms), (hours, HOUR_MS, minutes.since_unix_ms + HOUR_MS)
        ):  # fmt: skip
            cells = await counts.read([function], span)
            begins = {cell.begin_unix_ms for cell in cells if cell.counts.calls and cell.begin_unix_ms < ends_unix_ms}
            found = {begin: begin + size_ms for begin in begins} | found
        return sorted(found.items(), reverse=True)

    async def _within(
        self,
        wanted: Callable[[InvocationRow], bool],
        limit: int,
        since_unix_ms: int,
        until_unix_ms: int,
        searched_rows: int,
    ) -> tuple[list[InvocationRow], int]:
        """As `invocations`, with the number of rows that were searched; of a span with more, those of its begin."""
        found: deque[InvocationRow] = deque(maxlen=limit)
        searched = 0
        async with aclosing(self._reader.entries(since_unix_ms, until_unix_ms)) as pages:
            async for page in pages:
                found += _calls(page, wanted)
                searched += len(page)
                if searched >= searched_rows:
                    break
                await asyncio.sleep(0)
        return [*reversed(found)], searched

    async def trace(self, invocation: InvocationId) -> InvocationTrace:
        raw = await self._client.get(keys.trace(invocation))
        if raw is None:
            raise no_trace(invocation)
        return msgspec.json.decode(raw, type=InvocationTrace)

    async def given(self, request_id: str, sees: Callable[[FunctionName], bool]) -> InvocationId | None:
        """The newest of the latest invocations to which its caller gave that `X-Request-Id`, among those that one
        sees."""

        def wanted(row: InvocationRow) -> bool:
            return row.request_id == request_id and sees(row.function)

        found = await self.invocations(wanted, 1, searched_rows=GIVEN_SEARCHED_ROWS)
        return found[0].id if found else None

    async def plan(self, trace: InvocationTrace) -> Plan:
        """Reads the plan by which the call's worker was started. Errors: NotFound."""
        row = trace.row
        if not row.worker:
            why = "its starts failed" if row.error == StartFailed.code else "nothing was started for it"
            raise NotFound(
                f"invocation {row.id} reached no worker: HTTP {row.status} {row.error}".rstrip(),
                hint=f"{why}; `fs trace {row.id}` shows where it waited, `fs logs {row.function}` what workers said",
            )
        raw = await self._client.get(keys.plan(row.worker))
        if raw is None:
            how = HOW[row.start]
            raise NotFound(
                f"the plan of worker {row.worker}, which {how}, is not kept any more",
                hint=f"plans are kept for a day after the start; `fs trace {row.id}` has the call's timeline",
            )
        return msgspec.json.decode(raw, type=Plan)


def _calls(entries: Iterable[LedgerEntry], wanted: Callable[[InvocationRow], bool]) -> list[InvocationRow]:
    return [entry.row for entry in entries if isinstance(entry.row, InvocationRow) and wanted(entry.row)]


class TracesApi:
    """Serves the newest invocations, one invocation, and the plan of its worker's start."""

    def __init__(self, view: View, history: History, stored: InvocationsApi) -> None:
        self._view = view
        self._history = history
        self._stored = stored

    async def invocations(self, request: Request) -> Response:
        """Invocations of functions that the caller may see."""
        limit = query_int(request, "limit", LIMIT, LIMIT_MAX)
        until_unix_ms = query_int(request, "until_unix_ms", 0, TIME_MAX_MS)
        span = query_int(request, "since_unix_ms", 0, TIME_MAX_MS), until_unix_ms or None
        function, failed, sees = query_function(request), query_flag(request, "failed"), caller_of(request).sees

        def wanted(row: InvocationRow) -> bool:
            return function in (None, row.function) and (not failed or row.status >= 400) and sees(row.function)

        if not until_unix_ms:
            return json_response(await self._history.latest(function or ALL, wanted, limit, span[0]))
        return json_response(await self._history.invocations(wanted, limit, span))

    async def invocation(self, request: Request) -> Response:
        """A stored invocation, else the trace of a synchronous one."""
        return json_response(await self._stored.one(request) or await self._trace(request))

    async def plan(self, request: Request) -> Response:
        trace = await self._trace(request)
        plan = await self._history.plan(trace)
        key = VersionKey(trace.row.function, trace.row.version)
        version = self._view.versions.get(key)
        llm = None if version is None else version.spec.llm
        engine = "" if llm is None else llm.engine
        image = "" if version is None else version.spec.image
        prediction = prediction_of(self._view, key)
        return json_response(invocation_plan(trace, plan, engine=engine, image=image, prediction=prediction))

    async def _trace(self, request: Request) -> InvocationTrace:
        """Errors: NotFound, also if the caller may not see the function."""
        invocation = InvocationId(request.path_params["id"])
        sees = caller_of(request).sees
        try:
            trace = await self._history.trace(invocation)
        except NotFound:
            given = await self._history.given(invocation, sees)
            if given is None:
                raise
            trace = await self._history.trace(given)
        if not sees(trace.row.function):
            raise no_trace(invocation)
        return trace


def no_trace(invocation: InvocationId) -> NotFound:
    return NotFound(
        f"no invocation {invocation[:130]}",
        hint="answers carry the id in x-request-id, traces are kept for a day; `fs trace NAME` shows the latest",
    )


# ── the plan of a start, beside what was observed ──────────────────────────────────────────────────


def invocation_plan(
    trace: InvocationTrace, plan: Plan, *, engine: str, image: str, prediction: Prediction | None
) -> InvocationPlan:
    """Sets the plan of a worker's start beside what was observed of the call that waited for it. Pure. `engine`: that
    of a language model; empty for another function. `image`: that of its version's spec."""
    row = trace.row
    first_s = _first_byte_s(trace.timeline) if row.first_byte_ms is not None else None  # it may have run for nobody
    decided_s = (plan.decided_unix_ms - row.accepted_unix_ms) / 1000
    outcome = ObservedStart()
    if row.start in ("warm", "cold") and first_s is not None and plan.decided_unix_ms:
        ttft_s = max(0.0, first_s - decided_s)
        tpot_s = _token_s(trace) if engine else None
        outcome = ObservedStart(ttft_s=ttft_s, tpot_s=tpot_s, cost_gib_s=_cost_gib_s(plan, ttft_s))
    return InvocationPlan(
        row=row,
        explanation=explain(plan, outcome),
        ttft_s=first_s,
        decided_s=decided_s,
        tokens=bool(engine),
        engine=engine,
        image=image,
        prediction=prediction,
        relayed=trace.relayed,
        second_engine=trace.second_engine,
    )


def _first_byte_s(timeline: Timeline) -> float | None:
    """Time from acceptance to the first byte of a worker's response; None without one."""
    accepted_ns, answered_ns = _begin_ns(timeline, "queue"), _end_ns(timeline, "execute")
    return None if accepted_ns is None or answered_ns is None else (answered_ns - accepted_ns) / 1e9


def _token_s(trace: InvocationTrace) -> float | None:
    """Mean time per token of a stream: an event a token, besides opening and closing ones."""
    begun_ns, ended_ns = _begin_ns(trace.timeline, "respond"), _end_ns(trace.timeline, "respond")
    if begun_ns is None or ended_ns is None or trace.events < LEAST_EVENTS:
        return None
    return (ended_ns - begun_ns) / 1e9 / (trace.events - 3)


def _cost_gib_s(plan: Plan, ttft_s: float) -> float | None:
    """Memory reserved until the first token, or until a pipeline had become one worker; None before that."""
    reserved_bytes = sum(stage.reserved_bytes for stage in plan.stages)
    if len(plan.stages) == 1:
        return cost_gib_s(reserved_bytes, ttft_s, 0.0)
    if not plan.whole_unix_ms:
        return None
    return cost_gib_s(reserved_bytes, ttft_s, max(0.0, (plan.whole_unix_ms - plan.decided_unix_ms) / 1000 - ttft_s))


def _begin_ns(timeline: Timeline, name: PhaseName) -> int | None:
    return min((phase.started_ns for phase in timeline.phases if phase.name == name), default=None)


def _end_ns(timeline: Timeline, name: PhaseName) -> int | None:
    return max((phase.ended_ns for phase in timeline.phases if phase.name == name), default=None)
