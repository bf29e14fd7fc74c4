"""The autoscaler: scales up as soon as a burst is seen whole, and down after a keep-alive without need. Pure.

The need is a step function of time: each sample holds until the next. Deciding apart from doing is Knative's idea.
"""

from __future__ import annotations

import math
from collections import deque

from fleetstart.runtime.contract.function.spec import FunctionSpec, Scale
from fleetstart.runtime.contract.node.reports import ARRIVALS_S


class KeepAliveWindow:
    """The keep-alive window: the highest need over the last `keep_alive_s`.

    A new scheduler has seen nothing yet: it begins with the workers that are there, so that a change of
    scheduler never sends warm workers away before their time.
    """

    def __init__(self, workers: int, now_ns: int) -> None:
        self._current = 0
        self._past: deque[tuple[int, int]] = deque()
        """Past needs as (end, need). Needs fall from left to right, so the highest is first."""
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

    @property
    def empty(self) -> bool:
        """True if nothing is needed, and nothing was within the window."""
        return not self._current and not self._past

    def falls_ns(self, scale: Scale) -> int | None:
        """Time at which the highest need leaves the window, as far as is known now."""
        if not self._past or self._past[0][1] <= self._current:
            return None
        return self._past[0][0] + round(scale.keep_alive_s * 1e9)

    def desired(self, scale: Scale, now_ns: int) -> int:
        horizon_ns = now_ns - round(scale.keep_alive_s * 1e9)
        while self._past and self._past[0][0] <= horizon_ns:
            self._past.popleft()
        highest = max(self._current, self._past[0][1] if self._past else 0)
        return max(scale.min, min(highest, scale.max))


QUIET_SHARE = 0.05
"""Time without a new call after which a burst is over, relative to the time in which weights come: the wait costs a
start little, and one decision about all that is wanted is worth much more."""
QUIET_S, QUIET_SLOW_SHARE = 0.1, 0.01
"""Calls of one burst are nearer to each other than `QUIET_S`, but for a busy client, for which weights that take long
leave the time: that share of theirs more."""
QUIET_MOST_S = 1.0
GATHERED_MOST = 4
"""Maximum wait of a scale-up whose calls keep rising, in such times."""


def quiet_ns(size_bytes: int, bytes_per_s: float) -> int:
    """The time without a new call after which a scale-up is decided, for weights of that size over such links."""
    weights_s = size_bytes / bytes_per_s
    return round(min(QUIET_SHARE * weights_s, QUIET_S + QUIET_SLOW_SHARE * weights_s, QUIET_MOST_S) * 1e9)


class ScaleUpWindow:
    """The window in which the calls of a burst are gathered, so that one decision orders all workers that it wants.

    The calls of a burst are reported one after the other. Were workers ordered for each as it comes, the planner would
    see several starts of one worker, and never that one multicast could feed all of them.
    """

    def __init__(self) -> None:
        self._begun_ns: int | None = None
        self._rose_ns = 0
        self._calls = 0

    def wait_ns(self, *, missing: int, calls: int, now_ns: int, quiet_ns: int) -> int:
        """Time until the missing workers are to be ordered, as far as is known now; 0: now."""
        if missing <= 0:
            self._begun_ns = None
            return 0
        if self._begun_ns is None:
            self._begun_ns, self._rose_ns = now_ns, now_ns
        elif calls > self._calls:
            self._rose_ns = now_ns
        self._calls = calls
        due_ns = min(self._rose_ns + quiet_ns, self._begun_ns + GATHERED_MOST * quiet_ns)
        return max(0, due_ns - now_ns)


def workers_needed(
    *, queued: int, running: int, predicted: int, call_s: float, spec: FunctionSpec, window_s: float = ARRIVALS_S
) -> int:
    """The number of workers for the queued and running calls and, on average, the predicted ones.

    What runs is part of what was predicted a window ago, so the larger of the two counts, and all that waits. Of the
    average, whole calls count: a few short ones find their place between the others.
    """
    expected = int(predicted * min(1.0, call_s / window_s))
    return min(math.ceil((queued + max(running, expected)) / spec.concurrency), spec.scale.max)


def consolidation_count(*, group: int, full: int, needed: int, others: int) -> int:
    """The number of a group's workers that become whole: one (scale down), or as many as are needed beside the
    `others`.

    `others` are whole workers that there are or that are promised by other groups; `full` of the group have memory
    for it. The first stages grow: they have the memory, and the head keeps its streams.
    """
    return max(1, min(group, max(1, full), needed - others))
