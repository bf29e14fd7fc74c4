"""How long workers are kept: up at once, down when the keep-alive has seen no need.

The need is a step function of time: each sample holds until the next; `planner.window` says what it is. Knative's
autoscaler taught us to keep deciding apart from doing.
"""

from __future__ import annotations

from collections import deque

from fleetstart.runtime.contract.function.spec import Scale


class Window:
    """The highest need over the last `keep_alive_s`.

    A new scheduler has seen nothing yet: it begins with the workers that are there, so that a change of
    scheduler never sends warm workers away before their time.
    """

    def __init__(self, workers: int, now_ns: int) -> None:
        self._current = 0
        self._past: deque[tuple[int, int]] = deque()
        """(until when it held, need): needs fall from left to right, so the highest is first."""
        if workers:
            self._past.append((now_ns, workers))

    def observe(self, need: int, now_ns: int) -> None:
        if need == self._current:
            return
        while self._past and self._past[-1][1] <= self._current:
            self._past.pop()
        if self._current:
            self._past.append((now_ns, self._current))
        self._current = need

    def falls_ns(self, scale: Scale) -> int | None:
        """When the highest need of the window leaves it, as far as is known now."""
        if not self._past or self._past[0][1] <= self._current:
            return None
        return self._past[0][0] + round(scale.keep_alive_s * 1e9)

    def desired(self, scale: Scale, now_ns: int) -> int:
        horizon_ns = now_ns - round(scale.keep_alive_s * 1e9)
        while self._past and self._past[0][0] <= horizon_ns:
            self._past.popleft()
        highest = max(self._current, self._past[0][1] if self._past else 0)
        return max(scale.min, min(highest, scale.max))
