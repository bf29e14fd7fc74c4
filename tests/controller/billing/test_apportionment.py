"""Shares add up to the worker's busy time, whatever the order of calls."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.billing.apportionment import Meter

MS = 1_000_000


def test_one_call_pays_all_of_its_time() -> None:
    meter = Meter()
    meter.begin("a", 5 * MS)
    assert meter.end("a", 12 * MS) == 7


def test_two_calls_share_what_they_share() -> None:
    meter = Meter()
    meter.begin("a", 0)
    meter.begin("b", 10 * MS)
    assert meter.end("a", 30 * MS) == 20
    assert meter.end("b", 40 * MS) == 20


def test_what_is_below_a_millisecond_is_carried() -> None:
    meter = Meter()
    billed = []
    for i in range(10):
        meter.begin(i, i * MS)
        billed.append(meter.end(i, i * MS + MS // 2))
    assert sum(billed) == 5


def test_a_waived_call_costs_nobody_anything_more() -> None:
    meter = Meter()
    meter.begin("a", 0)
    meter.begin("b", 0)
    meter.waive("b", 10 * MS)
    assert meter.end("a", 20 * MS) == 15
    assert meter.end("b", 20 * MS) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3_000_000)), max_size=60))
def test_the_sum_of_the_bills_is_the_busy_time_to_the_last_millisecond(steps: list[tuple[int, int]]) -> None:
    """Each step lets time pass, then begins the call of that number or ends it if it runs."""
    meter, now_ns, busy_ns, billed_ms = Meter(), 0, 0, 0
    running: set[int] = set()
    for call, wait_ns in steps:
        now_ns += wait_ns
        busy_ns += wait_ns if running else 0
        if call in running:
            running.remove(call)
            billed_ms += meter.end(call, now_ns)
        else:
            running.add(call)
            meter.begin(call, now_ns)
    for call in sorted(running):
        billed_ms += meter.end(call, now_ns)
    assert billed_ms == busy_ns // MS


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3_000_000_000), st.booleans()),
        max_size=60,
    )
)
def test_each_call_pays_its_share_and_nobody_pays_for_a_waived_one(steps: list[tuple[int, int, bool]]) -> None:
    """Against a model in fractions: what a waived call would have paid is paid by nobody."""
    meter, now_ns, billed_ms = Meter(), 0, 0
    shares: dict[int, Fraction] = {}
    owed_ns = Fraction(0)
    for call, wait_ns, waived in [*steps, *((call, 0, False) for call in range(6))]:
        now_ns += wait_ns
        for other in shares:
            shares[other] += Fraction(wait_ns, len(shares))
        if call not in shares:
            if wait_ns or waived:
                shares[call] = Fraction(0)
                meter.begin(call, now_ns)
        elif waived:
            del shares[call]
            meter.waive(call, now_ns)
        else:
            owed_ns += shares.pop(call)
            billed_ms += meter.end(call, now_ns)
    # Less than a millisecond is carried on; of each stretch of time a call is charged less than a nanosecond too many.
    assert -len(steps) * 6 <= owed_ns - billed_ms * MS < MS + len(steps) * 6
    assert meter.end("nobody", now_ns) == 0
