"""Budgets: limits on a function's cost in a day or a month, and their state. Pure.

A budget is a hard stop for calls: once it is spent, new ones are refused with 402 until the period is over, those in
progress are served and billed, and the idle time of workers that are kept for the function is waived. So the overshoot
is the calls in progress at that moment, and what other gateways bill in the second until they know (`budget_watch`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NamedTuple

import msgspec

from fleetstart.runtime.contract.billing.ledger import dollars
from fleetstart.runtime.contract.errors import BudgetSpent, InvalidInput
from fleetstart.runtime.contract.ids import FunctionName

from ..schemas.functions import BudgetInfo, BudgetTerms

DAY_S = 86_400
LIMIT_MAX_NUSD = 10**9 * 10**9
"""Maximum budget: a thousand million dollars, so that sums stay well within 64 bits."""

Stage = Literal["ok", "alert", "spent"]


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """A function's budget."""

    function: FunctionName
    limit_nusd: int
    per: Literal["day", "month"]
    alert_percent: int


class BudgetEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An alert in fs:alerts, once for each stage of each period and limit."""

    function: FunctionName
    stage: Literal["alert", "spent"]
    period: str
    limit_nusd: int
    spent_nusd: int
    unix_ms: int


class Period(NamedTuple):
    """A day or a month, in days since 1970."""

    name: str
    first_day: int
    end_day: int

    @property
    def renews_unix_ms(self) -> int:
        return self.end_day * DAY_S * 1000


def budget_of(function: FunctionName, terms: BudgetTerms) -> Budget:
    """Makes a function's budget from its terms. Errors: InvalidInput."""
    if not 0 < terms.limit_nusd <= LIMIT_MAX_NUSD:
        raise InvalidInput(f"a budget is more than $0 and at most ${dollars(LIMIT_MAX_NUSD)}")
    if not 1 <= terms.alert_percent <= 100:
        raise InvalidInput(f"alert is 1 to 100 percent of the budget, got {terms.alert_percent}")
    return Budget(function=function, limit_nusd=terms.limit_nusd, per=terms.per, alert_percent=terms.alert_percent)


def period_at(per: Literal["day", "month"], unix_ms: int) -> Period:
    day = unix_ms // (DAY_S * 1000)
    now = datetime.fromtimestamp(day * DAY_S, UTC)
    if per == "day":
        return Period(now.strftime("%Y-%m-%d"), day, day + 1)
    following = now.replace(year=now.year + now.month // 12, month=now.month % 12 + 1, day=1)
    return Period(now.strftime("%Y-%m"), day - now.day + 1, int(following.timestamp()) // DAY_S)


def fields_of(budget: Budget, period: Period, unix_ms: int) -> list[str]:
    """Fields of fs:ledger:spent: the days of the period until now, and one more, as Redis' clock may be ahead."""
    today = unix_ms // (DAY_S * 1000)
    return [f"{day}:{budget.function}" for day in range(period.first_day, min(period.end_day, today + 2))]


@dataclass(slots=True)
class BudgetState:
    """A budget's spending in a period, as known to this process."""

    budget: Budget
    period: Period
    spent_nusd: int

    @property
    def stage(self) -> Stage:
        if self.spent_nusd >= self.budget.limit_nusd:
            return "spent"
        return "alert" if self.spent_nusd * 100 >= self.budget.limit_nusd * self.budget.alert_percent else "ok"

    def refusal(self, now_unix_ms: int) -> BudgetSpent | None:
        """The error for a call if the budget is spent; None if it is not, or the period is over."""
        left_ms = self.period.renews_unix_ms - now_unix_ms
        if self.stage != "spent" or left_ms <= 0:
            return None
        renews = datetime.fromtimestamp(self.period.renews_unix_ms // 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
        name = self.budget.function
        return BudgetSpent(
            f"function {name} has spent ${dollars(self.spent_nusd)} of its budget of "
            f"${dollars(self.budget.limit_nusd)} for {self.period.name}; it renews at {renews}",
            hint=f"`fs budget set {name} --usd ... --per {self.budget.per}` raises it; `fs usage {name}` says for what",
            retry_after_s=left_ms / 1000,
        )

    def info(self) -> BudgetInfo:
        return BudgetInfo(
            function=self.budget.function,
            limit_nusd=self.budget.limit_nusd,
            per=self.budget.per,
            alert_percent=self.budget.alert_percent,
            spent_nusd=self.spent_nusd,
            stage=self.stage,
            period=self.period.name,
            renews_unix_ms=self.period.renews_unix_ms,
        )

    def events(self, now_unix_ms: int) -> list[BudgetEvent]:
        """All alerts of its stage; the writer skips those that were written before."""
        stages: Mapping[Stage, tuple[Literal["alert", "spent"], ...]] = {
            "ok": (), "alert": ("alert",), "spent": ("alert", "spent"),
        }  # fmt: skip
        return [
            BudgetEvent(
                function=self.budget.function,
                stage=stage,
                period=self.period.name,
                limit_nusd=self.budget.limit_nusd,
                spent_nusd=self.spent_nusd,
                unix_ms=now_unix_ms,
            )
            for stage in stages[self.stage]
        ]
