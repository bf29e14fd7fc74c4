"""Decides which prepared spare workers a node keeps. Pure.

A spare holds the memory of its imports, up to some hundred megabytes, for one version that may not be called again. It
only has memory that is spare: whatever needs it gets it, and the spare that waited longest ends first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fleetstart.runtime.contract.ids import FunctionName, Version

IDLE_S = 900.0
"""A spare that was not needed for so long ends: the function is called less than four times an hour."""
SPARES_MAX = 8
"""More would fill a node with processes of functions that were called once."""


class VersionOf(NamedTuple):
    """One version of a function."""

    function: FunctionName
    version: Version

    def __str__(self) -> str:
        return f"{self.function}@{self.version}"


class SpareState(NamedTuple):
    size_bytes: int
    since_s: float


def expired(spares: Mapping[VersionOf, SpareState], now_s: float) -> list[VersionOf]:
    """Spares to end: those that waited too long, and the oldest above the maximum."""
    oldest = sorted(spares, key=lambda version: spares[version].since_s)
    above = oldest[: max(0, len(oldest) - SPARES_MAX)]
    return [version for version in oldest if version in above or now_s - spares[version].since_s > IDLE_S]


def surplus(spares: Mapping[VersionOf, SpareState], needed_bytes: int) -> list[VersionOf]:
    """Spares to end so that so many bytes are free, the oldest first; all, if they have less."""
    chosen: list[VersionOf] = []
    for version in sorted(spares, key=lambda version: spares[version].since_s):
        if needed_bytes <= 0:
            break
        chosen.append(version)
        needed_bytes -= spares[version].size_bytes
    return chosen
