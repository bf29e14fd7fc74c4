"""The count of the calls of the last seconds, by which a gateway tells the scheduler what to expect. Pure."""

from __future__ import annotations

from collections import deque

from fleetstart.runtime.contract.node.reports import ARRIVALS_S

SLICE_NS = 100_000_000
"""Calls that come within it are counted together: a hundred counters, however many calls there are."""


class RecentCalls:
    """Counts calls in slices of time. Each gateway counts its own: a sum of counters that gateways began at different
    times would say nothing about the last seconds."""

    def __init__(self, window_ns: int = round(ARRIVALS_S * 1e9)) -> None:
        self._window_ns = window_ns
        self._slices: deque[tuple[int, int]] = deque()
        """(begin, calls), the oldest first."""
        self._count = 0

    def add(self, now_ns: int) -> None:
        self._count += 1
        if self._slices and now_ns - self._slices[-1][0] < SLICE_NS:
            begin_ns, calls = self._slices.pop()
            self._slices.append((begin_ns, calls + 1))
        else:
            self._forget(now_ns)
            self._slices.append((now_ns, 1))

    def count(self, now_ns: int) -> int:
        self._forget(now_ns)
        return self._count

    def _forget(self, now_ns: int) -> None:
        while self._slices and self._slices[0][0] <= now_ns - self._window_ns:
            self._count -= self._slices.popleft()[1]
