"""Time as a value: decisions take `now`, shells own a Clock, tests own a ManualClock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic_ns(self) -> int:
        """Nanoseconds that never go back; comparable between processes of one machine."""
        ...

    def unix_ns(self) -> int:
        """Nanoseconds since 1970, for records that people read and for other machines."""
        ...


class SystemClock:
    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def unix_ns(self) -> int:
        return time.time_ns()


class ManualClock:
    """A clock that a test moves by hand."""

    def __init__(self, unix_ns: int = 1_700_000_000_000_000_000) -> None:
        self._unix_ns = unix_ns
        self._monotonic_ns = 0

    def advance(self, seconds: float) -> None:
        step_ns = round(seconds * 1e9)
        self._unix_ns += step_ns
        self._monotonic_ns += step_ns

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def unix_ns(self) -> int:
        return self._unix_ns
