"""Which sheet is in force, and which may follow."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.billing.prices import (
    AHEAD_MAX_MS,
    FIRST,
    LEAD_MS,
    RATE_MAX_NUSD,
    PriceSheet,
    check_next,
    in_force,
    read_sheets,
)
from fleetstart.runtime.contract.errors import InvalidInput


def sheet(version: int, from_unix_ms: int) -> PriceSheet:
    return PriceSheet(version=version, from_unix_ms=from_unix_ms, execute_nusd_per_gib_s=1, idle_nusd_per_gib_s=1)


@given(st.lists(st.integers(1, 10**6), unique=True, max_size=8), st.integers(0, 10**6))
def test_the_last_sheet_whose_moment_has_come_is_in_force(moments: list[int], now: int) -> None:
    sheets = [FIRST, *(sheet(i + 2, moment) for i, moment in enumerate(sorted(moments)))]
    found = in_force(sheets, now)
    assert found == max((s for s in sheets if s.from_unix_ms <= now), key=lambda s: s.from_unix_ms)


def test_without_any_sheet_the_first_is_in_force() -> None:
    assert in_force([], 5) == FIRST
    assert read_sheets([]) == [FIRST]
    assert read_sheets([msgspec.json.encode(sheet(3, 9)), msgspec.json.encode(sheet(2, 5))])[-1].version == 3


@pytest.mark.parametrize(
    ("from_unix_ms", "allowed"),
    [(1000 + LEAD_MS, False), (50_000 + LEAD_MS - 1, False), (70_000 + LEAD_MS, False), (70_001 + LEAD_MS, True)],
)
def test_nothing_is_priced_again(from_unix_ms: int, allowed: bool) -> None:
    sheets = [FIRST, sheet(2, 70_000 + LEAD_MS)]
    if allowed:
        check_next(sheets, sheet(3, from_unix_ms), 50_000)
        return
    with pytest.raises(InvalidInput, match="too early: 1970-01-01 00:02:11 UTC is the earliest"):
        check_next(sheets, sheet(3, from_unix_ms), 50_000)


def test_a_rate_below_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput, match="0 or more"):
        check_next([FIRST], msgspec.structs.replace(sheet(2, 10**9), idle_nusd_per_gib_s=-1), 0)


def test_a_rate_whose_costs_would_leave_64_bits_is_refused() -> None:
    most = msgspec.structs.replace(sheet(2, 10**9), execute_nusd_per_gib_s=RATE_MAX_NUSD)
    check_next([FIRST], most, 0)
    gib_s = 1024 * 86_400
    assert RATE_MAX_NUSD * gib_s < 1 << 62
    for more in (
        {"execute_nusd_per_gib_s": RATE_MAX_NUSD + 1},
        {"idle_nusd_per_gib_s": 10**39},
        {"device_nusd_per_gib_s": {"H100": 10**29}},
    ):
        with pytest.raises(InvalidInput, match=r"at most \$10"):
            check_next([FIRST], msgspec.structs.replace(most, **more), 0)


def test_a_sheet_that_would_end_all_changes_is_refused() -> None:
    check_next([FIRST], sheet(2, AHEAD_MAX_MS), 0)
    with pytest.raises(InvalidInput, match="more than a year ahead"):
        check_next([FIRST], sheet(2, AHEAD_MAX_MS + 1), 0)


@pytest.mark.parametrize("name", ["", "h100", "H 100", "CPU", "4090"])
def test_rates_are_of_types_that_devices_have(name: str) -> None:
    with pytest.raises(InvalidInput, match="no type that a device could have"):
        check_next([FIRST], msgspec.structs.replace(sheet(2, 10**9), device_nusd_per_gib_s={name: 1}), 0)


def test_a_type_without_a_rate_costs_nothing() -> None:
    priced = msgspec.structs.replace(sheet(2, 10**9), device_nusd_per_gib_s={"H100": 5})
    assert (priced.device_rate("H100"), priced.device_rate("T4"), priced.device_rate("")) == (5, 0, 0)
    with pytest.raises(InvalidInput, match="0 or more"):
        check_next([FIRST], msgspec.structs.replace(priced, device_nusd_per_gib_s={"H100": -1}), 0)
