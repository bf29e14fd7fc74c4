"""Times and amounts of money that commands are given."""

from __future__ import annotations

import click
import pytest

from fleetstart.controller.cli.units import parse_nano_dollars, parse_unix_ms


@pytest.mark.parametrize(("text", "nusd"), [("5", 5 * 10**9), ("$0.25", 250_000_000), ("1e-9", 1), ("0", 0)])
def test_amounts_are_exact_nano_dollars(text: str, nusd: int) -> None:
    assert parse_nano_dollars(text, option="--usd") == nusd


@pytest.mark.parametrize(
    "text", ["1e999999", "1e5000", "1e18", "-1e999999", "-1", "1e-10", "NaN", "Infinity", "five", ""]
)
def test_an_amount_that_is_none_is_a_wrong_command_line(text: str) -> None:
    with pytest.raises(click.BadParameter):
        parse_nano_dollars(text, option="--usd")


@pytest.mark.parametrize("text", ["9" * 400 + "d", "9" * 30 + "w"])
def test_an_age_beyond_all_numbers_is_before_all_there_is(text: str) -> None:
    assert parse_unix_ms(text, now_s=1.7e9, option="--since") == 0


def test_a_date_is_utc_unless_it_has_a_zone() -> None:
    assert parse_unix_ms("2026-01-31", now_s=0, option="--since") == 1_769_817_600_000
    assert parse_unix_ms("2026-01-31T01:00+01:00", now_s=0, option="--since") == 1_769_817_600_000
