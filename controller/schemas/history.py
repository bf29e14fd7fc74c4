"""Structs of the history of calls: points in time, totals, and events such as deploys and failed starts."""

from __future__ import annotations

from typing import Literal

import msgspec

RangeName = Literal["1h", "6h", "24h", "7d", "30d"]
EventKind = Literal["deploy", "change", "failure", "budget", "node"]


class HistoryPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The calls that ended within one step, or within all of them."""

    begin_unix_ms: int
    calls: int
    failed: int
    """Answered with a status of 500 or more, or given up by their callers."""
    refused: int
    """Answered with 4xx."""
    warm: int
    """Calls that waited for a start which had its weights in memory."""
    cold: int
    """Calls that waited for a start which fetched weights."""
    cost_nusd: int
    """Cost of the calls; idle time of workers kept by `min` is in `usage` only."""
    p50_ms: float | None
    p95_ms: float | None
    """Time from acceptance to the complete response, too high by 15 % at most; None without calls."""
    wait_p50_ms: float | None
    """Time that calls waited for a start; None if none did."""


class CallHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one function, or of all, over a range of time."""

    function: str
    """Empty: all functions that the caller may see."""
    range: RangeName
    step_s: int
    since_unix_ms: int
    until_unix_ms: int
    """End of the last step, which may lie in the future."""
    points: list[HistoryPoint]
    """One for each step, the oldest first."""
    total: HistoryPoint


class FunctionTotal(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one function within a span of time."""

    function: str
    total: HistoryPoint


class SystemEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A deploy, a change, a failed start, an alert of a budget, or the drain of a node."""

    unix_ms: int
    kind: EventKind
    function: str = ""
    version: int = 0
    """0: not about one version."""
    text: str
