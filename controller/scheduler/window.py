"""How many workers a version will need, and how many of a pipeline grow into whole ones (HydraServe section 6.1).

The calls of the previous window predict the most that the next one brings; with those that wait they say how many
workers are needed. Departure: the paper counts requests, and its windows are as long as a request. Ours weigh a call
by the part of the window that it keeps its place (Little's law), or a thousand short calls would order a worker each.
The keep-alive, which decides when workers go, is `autoscale.Window`'s.
"""

from __future__ import annotations

import math
from collections import deque

from fleetstart.runtime.contract.function.spec import FunctionSpec

WINDOW_S = 10.0
"""A burst is seen whole, and what was before it is forgotten before the pipeline is one worker again."""


class Arrivals:
    """The calls of the last window. A new scheduler has seen none, and learns within one window."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._total: int | None = None
        self._seen: deque[tuple[float, int]] = deque()
        self._count = 0

    def observe(self, total: int, now_s: float) -> None:
        """`total` calls ever. Less than before: a gateway has gone, and its calls with it."""
        arrived = total - self._total if self._total is not None else 0
        self._total = total
        if arrived > 0:
            self._seen.append((now_s, arrived))
            self._count += arrived

    def predicted(self, now_s: float) -> int:
        """The most calls that the next window is expected to bring: as many as the last one brought."""
        while self._seen and self._seen[0][0] <= now_s - self._window_s:
            self._count -= self._seen.popleft()[1]
        return self._count


def needed(
    *, queued: int, running: int, predicted: int, call_s: float, spec: FunctionSpec, window_s: float = WINDOW_S
) -> int:
    """Workers that these calls would keep busy: waiting, running, and on average those that are predicted.

    What runs is part of what was predicted a window ago, so the larger of the two counts, and all that waits. Of the
    average, whole calls count: a few short ones find their place between the others.
    """
    expected = int(predicted * min(1.0, call_s / window_s))
    return min(math.ceil((queued + max(running, expected)) / spec.concurrency), spec.scale.max)


def growing(*, group: int, full: int, needed: int, others: int) -> int:
    """How many of a group's workers become whole: one (scale down), or as many as are needed beside the `others`.

    `others` are whole workers that there are or that are promised by other groups; `full` of the group have memory
    for it. The first stages grow: they have the memory, and the head keeps its streams.
    """
    return max(1, min(group, max(1, full), needed - others))
