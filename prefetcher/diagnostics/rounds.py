"""Rounds of a measurement: threads that take numbered pieces of work from one counter, within a time limit.

Fetches work the same way: no thread waits for another's share, and a slow device ends a round by the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

Take = Callable[[int, Callable[[], bool]], int]
"""Does the piece of work with this number, unless stopped; returns its bytes."""


class Rounds:
    """Rounds over `pieces` numbers; each takes a number once at most, beginning where the last one ended."""

    def __init__(self, pieces: int, take: Take) -> None:
        self._pieces = pieces
        self._take = take
        self._begin = 0

    def run(self, threads: int, limit_s: float) -> float:
        """Bytes a second of one round; 0 if no piece was done in time. Errors: as of `take`."""
        numbers = iter(range(self._begin, self._begin + self._pieces))
        stop_s = time.monotonic() + limit_s

        def stopped() -> bool:
            return time.monotonic() >= stop_s

        def work() -> int:
            size_bytes = 0
            while not stopped() and (number := next(numbers, None)) is not None:
                size_bytes += self._take(number % self._pieces, stopped)
            return size_bytes

        with ThreadPoolExecutor(threads) as workers:
            began_s = time.monotonic()
            size_bytes = sum(work.result() for work in [workers.submit(work) for _ in range(threads)])
            took_s = time.monotonic() - began_s
        self._begin = next(numbers, self._begin + self._pieces) % self._pieces
        return size_bytes / max(took_s, 1e-9)
