"""The budget watch: prices and spent budgets in memory, for gateways to check without a round trip.

Read from Redis once a second. The cost of this gateway's own calls counts at once, that of others' a second later.
While Redis is unavailable the last sums stay, and own calls go on counting. On the scheduling controller the watch
also writes alerts (log, fs:alerts), and the workers that are kept because of `min` (fs:kept).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import InvocationRow, dollars
from fleetstart.runtime.contract.billing.prices import FIRST, PriceSheet, in_force
from fleetstart.runtime.contract.errors import BudgetSpent, Unavailable
from fleetstart.runtime.contract.ids import FunctionName, WorkerId
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord

from ..state.records import VersionKey, is_helper
from ..state.redis_client import REDIS_ERRORS, Script
from ..state.traffic import in_service, scale_of
from ..state.view import View
from .budgets import Budget, BudgetEvent, BudgetState, fields_of, period_at

log = logging.getLogger(__name__)

READ_S = 1.0
FIRST_READ_S = 0.1
"""Pause while they were never read: until then, calls are refused, also by a gateway that has read all the rest."""
ALERTED_KEPT_S = 62 * 86_400
ALERTS_KEPT = 1000
KEPT_AGAIN_NS = 10_000_000_000
"""Interval at which the kept workers are written although they are the same: a Redis that was killed may have lost
them."""


class BudgetWatch:
    def __init__(
        self,
        client: redis.Redis,
        view: View,
        *,
        unwritten: Callable[[], Iterable[InvocationRow]],
        fence: Callable[[], int],
    ) -> None:
        """`unwritten`: own rows that Redis does not have yet; `fence`: 0 while another controller schedules."""
        self._client = client
        self._view = view
        self._unwritten = unwritten
        self._fence = fence
        self._alert = Script(client, "budget_alert")
        self._set_kept = Script(client, "set_kept")
        self.known = asyncio.Event()
        """Set when prices and budgets were first read."""
        self._budget_decoder = RecordDecoder(Budget)
        self._sheet_decoder = RecordDecoder(PriceSheet)
        self._states: dict[FunctionName, BudgetState] = {}
        self._behind_ms = 0
        """How far this machine's clock is behind that of Redis, which books rows, and so ends days and months."""
        self._sheets: list[PriceSheet] = []
        self._alerted: set[tuple[FunctionName, str, str, int]] = set()
        self.alert_rounds = 0
        """Number of rounds in which alerts were written."""
        self._kept: frozenset[WorkerId] | None = None
        self._kept_by: dict[VersionKey, list[WorkerId]] = {}
        """The same by version, so that a change of one costs no look at all."""
        self._kept_ns = 0
        """Monotonic time at which they were written."""
        self._changes = view.follow()
        self._spent: frozenset[FunctionName] = frozenset()

    async def run(self) -> None:
        while True:
            try:
                await self.read()
                if self._fence():
                    await self._write_alerts()
                    await self._write_kept()
                    self.alert_rounds += 1
                else:
                    self._kept = None
            except REDIS_ERRORS as error:
                log.warning("prices and budgets were not read", extra={"error": str(error)})
            await asyncio.sleep(READ_S if self.known.is_set() else FIRST_READ_S)

    # ── queries ───────────────────────────────────────────────────────────────────────────────────

    def price(self, unix_ms: int) -> PriceSheet:
        """The price sheet in force. Errors: Unavailable while none is known, as just after the start."""
        if not self._sheets:
            raise Unavailable("prices are not known yet: Redis was not read", retry_after_s=1)
        return in_force(self._sheets, unix_ms)

    def refusal(self, function: FunctionName, now_unix_ms: int) -> BudgetSpent | None:
        """The error for a call now, by this machine's clock; None if the function's budget is not spent."""
        state = self._states.get(function)
        return state.refusal(now_unix_ms + self._behind_ms) if state is not None else None

    def note(self, row: InvocationRow) -> None:
        """Counts the cost of an own call that has ended."""
        state = self._states.get(row.function)
        if state is not None:
            state.spent_nusd += row.cost_nusd

    @property
    def states(self) -> list[BudgetState]:
        return [self._states[name] for name in sorted(self._states)]

    # ── reading ────────────────────────────────────────────────────────────────────────────────────

    async def read(self) -> None:
        """Reads prices, budgets and sums. Errors: REDIS_ERRORS."""
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.PRICES)
            pipe.hgetall(keys.BUDGETS)
            pipe.time()
            prices, raw, (seconds, micros) = await pipe.execute()
        now_unix_ms = int(seconds) * 1000 + int(micros) // 1000
        self._behind_ms = now_unix_ms - time.time_ns() // 1_000_000
        self._sheets = self._read_sheets(prices)
        budgets = self._read_budgets(raw)
        states = {b.function: BudgetState(b, period_at(b.per, now_unix_ms), 0) for b in budgets}
        wanted = [(s, name) for s in states.values() for name in fields_of(s.budget, s.period, now_unix_ms)]
        if wanted:
            sums: Any = await self._client.hmget(keys.LEDGER_SPENT, [name for _, name in wanted])
            for (state, _), cost in zip(wanted, sums, strict=True):
                state.spent_nusd += int(cost or 0)
            for row in self._unwritten():
                if row.function in states:
                    states[row.function].spent_nusd += row.cost_nusd
        self._states = states
        self.known.set()

    def _read_sheets(self, raw: Mapping[bytes, bytes]) -> list[PriceSheet]:
        """The sheets that can be read. If one cannot, those that are known already stay."""
        found, problems = {FIRST.version: FIRST}, {}
        for number, data in raw.items():
            try:
                sheet = self._sheet_decoder.decode(data)
                found[sheet.version] = sheet
            except UnreadableRecord as error:
                problems[number.decode(errors="replace")] = str(error)
        self._view.unreadable.replace("price sheet", problems)
        if problems:
            found = {sheet.version: sheet for sheet in self._sheets} | found
        return [found[version] for version in sorted(found)]

    def _read_budgets(self, raw: Mapping[bytes, bytes]) -> list[Budget]:
        """The budgets. One that cannot be read stays as it was last: a limit must not end with an upgrade."""
        found: list[Budget] = []
        problems: dict[str, str] = {}
        for field, data in raw.items():
            try:
                found.append(self._budget_decoder.decode(data))
            except UnreadableRecord as error:
                name = field.decode(errors="replace")
                problems[name] = str(error)
                known = self._states.get(FunctionName(name))
                if known is not None:
                    found.append(known.budget)
        self._view.unreadable.replace("budget", problems)
        return found

    # ── the scheduler's ────────────────────────────────────────────────────────────────────────────

    async def _write_alerts(self) -> None:
        now_unix_ms = time.time_ns() // 1_000_000
        for state in self._states.values():
            for event in state.events(now_unix_ms):
                what = (event.function, event.period, event.stage, event.limit_nusd)
                if what not in self._alerted:
                    await self._alert_once(event)
                    self._alerted.add(what)

    async def _alert_once(self, event: BudgetEvent) -> None:
        name = keys.alerted(f"{event.function}:{event.period}:{event.limit_nusd}:{event.stage}")
        if await self._alert([name, keys.ALERTS], [msgspec.json.encode(event), ALERTED_KEPT_S, ALERTS_KEPT]):
            log.warning(
                "a budget is spent: calls are refused" if event.stage == "spent" else "a budget will be spent soon",
                extra={
                    "function": event.function,
                    "period": event.period,
                    "spent_usd": dollars(event.spent_nusd),
                    "limit_usd": dollars(event.limit_nusd),
                },
            )

    async def _write_kept(self) -> None:
        spent = frozenset(state.budget.function for state in self._states.values() if state.stage == "spent")
        now_ns = time.monotonic_ns()
        if now_ns - self._kept_ns > KEPT_AGAIN_NS:
            self._kept = None
        changed = self._changes.take_versions()
        if self._kept is None or spent != self._spent:
            self._kept_by = kept_by_version(self._view, spent, self._view.ordered_versions())
        elif changed:
            self._kept_by = {key: kept for key, kept in self._kept_by.items() if key not in changed}
            self._kept_by |= kept_by_version(self._view, spent, changed)
        else:
            return
        self._spent = spent
        kept = frozenset(worker for workers in self._kept_by.values() for worker in workers)
        if kept == self._kept or not self._view.synced:
            return
        written = await self._set_kept([keys.FENCE, keys.KEPT], [self._fence(), *sorted(kept)])
        self._kept, self._kept_ns = (kept, now_ns) if written else (None, 0)


def kept_workers(view: View, spent: Set[FunctionName]) -> frozenset[WorkerId]:
    """The `min` longest-ready workers of each version in service, by the scaling that is in force; none of a function
    whose budget is spent."""
    found = kept_by_version(view, spent, view.ordered_versions())
    return frozenset(worker for workers in found.values() for worker in workers)


def kept_by_version(
    view: View, spent: Set[FunctionName], keys: Iterable[VersionKey]
) -> dict[VersionKey, list[WorkerId]]:
    """The kept workers of these versions; those without any are left out."""
    found: dict[VersionKey, list[WorkerId]] = {}
    for key in keys:
        record, version = view.functions.get(key.name), view.versions.get(key)
        if record is None or version is None or key.name in spent or key.version not in in_service(record):
            continue
        least = scale_of(record, version.spec).min
        if not least:
            continue
        ready = [
            (status.changed_unix_ns, order.worker)
            for order in view.orders_of(key).values()
            if order.wanted == "run"
            if (status := view.statuses.get(order.worker)) is not None
            if status.state == "ready" and not is_helper(order, status)
        ]
        if ready:
            found[key] = [worker for _, worker in sorted(ready)[:least]]
    return found
