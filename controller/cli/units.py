"""Parsing and formatting of times, durations and amounts of money."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation

import click

_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
AMOUNT_END = 10**18
"""Dollars that are more than any limit: amounts below it are numbers that every program can read and write."""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_unix_ms(text: str, *, now_s: float, option: str) -> int:
    """Parses an age ("24h" ago) or a date, UTC unless it has another zone. Errors: click.BadParameter."""
    if match := _LENGTH.fullmatch(text.strip()):
        # So long ago that it is no number: before all there is.
        return round(max(0.0, now_s - float(match[1]) * _SECONDS[match[2]]) * 1000)
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is neither an age such as 24h nor a date", param_hint=option) from error
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def parse_seconds(text: str, *, option: str) -> float:
    """Parses a duration such as 90s, 12h or 30d. Errors: click.BadParameter."""
    match = _LENGTH.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a duration such as 90s, 12h or 30d", param_hint=option)
    return float(match[1]) * _SECONDS[match[2]]


def parse_nano_dollars(text: str, *, option: str) -> int:
    """Parses an amount in dollars: "0.05" → 50,000,000. Errors: click.BadParameter."""
    try:
        given = Decimal(text.strip().removeprefix("$"))
    except InvalidOperation as error:
        raise click.BadParameter(f"{text!r} is not an amount such as 5 or 0.25", param_hint=option) from error
    if not given.is_finite() or not 0 <= given < AMOUNT_END:
        raise click.BadParameter(f"{text[:40]!r} is not an amount of 0 or more below 1e18", param_hint=option)
    amount = given * 10**9
    if amount != int(amount):
        raise click.BadParameter(f"{text!r} is not an amount of 0 or more with up to nine decimals", param_hint=option)
    return int(amount)


def format_utc(moment_unix_ms: int) -> str:
    return datetime.fromtimestamp(moment_unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
