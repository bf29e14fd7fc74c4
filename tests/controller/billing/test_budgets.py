"""Budgets: periods of the calendar, stages, and what a caller is told."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.billing.budgets import BudgetState, budget_of, fields_of, period_at
from fleetstart.controller.schemas.functions import BudgetTerms
from fleetstart.runtime.contract.errors import InvalidInput
from fleetstart.runtime.contract.ids import FunctionName

F = FunctionName("f")


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


@pytest.mark.parametrize(
    ("per", "now", "name", "renews"),
    [
        ("day", "2026-11-22T23:59:59.999", "2026-11-22", "2026-11-23"),
        ("month", "2026-11-22T10:00", "2026-11", "2026-12-01"),
        ("month", "2026-12-31T23:59", "2026-12", "2027-01-01"),
        ("month", "2024-02-29", "2024-02", "2024-03-01"),
    ],
)
def test_periods_are_those_of_the_calendar(per: str, now: str, name: str, renews: str) -> None:
    period = period_at(per, ms(now))  # type: ignore[arg-type]
    assert (period.name, period.renews_unix_ms) == (name, ms(renews))


@given(st.integers(0, 4 * 10**12), st.sampled_from(["day", "month"]))
def test_every_moment_is_in_its_period_and_the_next_begins_where_it_ends(now: int, per: str) -> None:
    period = period_at(per, now)  # type: ignore[arg-type]
    assert period.first_day * 86_400_000 <= now < period.renews_unix_ms
    assert period_at(per, period.renews_unix_ms).first_day == period.end_day  # type: ignore[arg-type]
    assert period_at(per, period.renews_unix_ms - 1) == period  # type: ignore[arg-type]


def state(spent: int, *, limit: int = 1000, alert: int = 80, per: str = "day") -> BudgetState:
    terms = BudgetTerms(limit_nusd=limit, per=per, alert_percent=alert)  # type: ignore[arg-type]
    return BudgetState(budget_of(F, terms), period_at(terms.per, ms("2026-11-22T12:00")), spent)


@pytest.mark.parametrize(("spent", "stage"), [(0, "ok"), (799, "ok"), (800, "alert"), (999, "alert"), (1000, "spent")])
def test_stages(spent: int, stage: str) -> None:
    assert state(spent).stage == stage
    told = {"ok": [], "alert": ["alert"], "spent": ["alert", "spent"]}[stage]
    assert [event.stage for event in state(spent).events(5)] == told


def test_a_call_is_refused_until_the_budget_renews() -> None:
    spent = state(1001)
    refusal = spent.refusal(ms("2026-11-22T23:59:58"))
    assert refusal is not None
    assert (refusal.status, refusal.retry_after_s) == (402, 2.0)
    assert "renews at 2026-11-23 00:00 UTC" in refusal.message
    assert spent.refusal(ms("2026-11-23")) is None, "also if Redis did not answer since"
    assert state(999).refusal(ms("2026-11-22T12:00")) is None


def test_only_days_of_the_period_are_added_up() -> None:
    monthly = state(0, per="month")
    now = ms("2026-11-03T12:00")
    fields = fields_of(monthly.budget, period_at("month", now), now)
    first = ms("2026-11-01") // 86_400_000
    assert fields == [f"{first + i}:f" for i in range(4)]
    assert len(fields_of(state(0).budget, period_at("day", now), now)) == 1


@pytest.mark.parametrize(("limit", "alert"), [(0, 80), (-5, 80), (10**30, 80), (5, 0), (5, 101)])
def test_terms_that_make_no_sense_are_refused(limit: int, alert: int) -> None:
    with pytest.raises(InvalidInput):
        budget_of(F, BudgetTerms(limit_nusd=limit, per="day", alert_percent=alert))
