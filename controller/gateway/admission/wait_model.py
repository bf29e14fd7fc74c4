"""Queueing model of the wait for a slot, from the queue ahead, measured service times, and starts under way.

Pure: values and `now` in, seconds out. `wait_predictor` gathers the values, `rejections` words the result.

A start is predicted as the planner predicts it (HydraServe eq. 5), less the time that has passed: its own steps and its
missing bytes go on side by side. Bytes are expected at the rate at which they arrived; before two reports, at the
planner's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from fleetstart.runtime.contract.wait_estimate import PendingStart

UNKNOWN_S = math.inf
LATE_SHARE = 0.1
"""A start that is later than was predicted is expected to take this part of the time so far longer: it may end at any
moment, but one that is a minute late is rarely ready in the next millisecond."""
SAMPLES = 8
"""Reports of a segment, about one a second, that its rate is taken from: quick enough for a store that stalls."""
LEAST_REPORTS = 3
"""Reports that a rate is compared with others from: two may lie around a single chunk."""
STEADY_RATIO = 4.0
"""A rate is steady unless one of the last was more than this many times as high. Chunks that are fetched side by side
also end side by side, and of such waves SAMPLES reports may see three or only one."""
EMPTY_NS = 3_500_000_000
"""Time without a byte that is a stall among the first 2 * SAMPLES reports: no waves of before speak against it, and the
mean of few reports falls too slowly to show it."""
FORGOTTEN_NS = 15_000_000_000
"""A report that comes so long after the one before, with no call to note those between, says nothing of a rate."""
LEAST_CALL_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """The queue, slots and pending starts that a call finds when it comes."""

    queued: int
    slots: int
    """Slots of ready workers."""
    running: int
    """Slots that are taken."""
    elapsed_s: float
    """Sum of the run times of the running calls."""
    call_s: float
    """Mean service time."""
    coming: Sequence[PendingStart] = ()


def predicted_wait_s(line: QueueState) -> float:
    """Predicts the time until a call that comes now has a slot; UNKNOWN_S if no slot is to come.

    Slots that are taken come free at a rate of slots / call_s, the first of them as much sooner as the calls on them
    have run; each worker that comes brings its slots at once, and its share of the rate from then on.
    """
    call_s = max(line.call_s, LEAST_CALL_S)
    free = max(0, line.slots - line.running)
    ahead = line.queued + 1 - free
    if ahead <= 0:
        return 0.0
    need = ahead - 0.5
    turns, rate, at_s = 0.0, line.slots / call_s, 0.0
    if line.slots:
        left_s = min(max(line.slots * call_s - line.elapsed_s, 0.0), line.slots * call_s)
        turns = line.slots / 2 - left_s / call_s
    for worker in sorted(line.coming, key=lambda one: one.ready_s):
        if rate and at_s + (need - turns) / rate <= worker.ready_s:
            break
        turns += rate * (worker.ready_s - at_s) + worker.slots
        at_s = worker.ready_s
        if turns >= need:
            return at_s
        rate += worker.slots / call_s
    return max(at_s, at_s + (need - turns) / rate) if rate else UNKNOWN_S


def possible_since_s(since_s: float, longest_s: float) -> float:
    """The time that a start has taken by the clocks of two machines, of which one may be an hour off: 0 if it is
    negative or longer than a start may take. Else a start would be expected later by a tenth of that hour, or all of
    it."""
    return since_s if 0 <= since_s <= longest_s else 0.0


def remaining_start_s(*, own_s: float, since_s: float, fetch_s: float) -> float:
    """Predicts the time until a worker is ready whose order was given `since_s` ago.

    `own_s` is what all its own steps were predicted to take, `fetch_s` what its missing bytes still will.
    """
    left_s = max(own_s - since_s, fetch_s)
    return left_s if left_s > 0 else LATE_SHARE * max(0.0, since_s)


class FillRate:
    """The rate at which the bytes of one segment arrive, by those reports of its node that were noted."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, int]] = deque(maxlen=SAMPLES)
        self._rates: deque[float] = deque(maxlen=2 * SAMPLES)
        """The last rates, with which the present one is compared."""
        self._noted = 0
        """Reports since it began."""

    def note(self, counted_unix_ns: int, ready_bytes: int) -> None:
        """The same report again changes nothing. One with fewer bytes than before, which were evicted, starts over, as
        does one long after the last."""
        if self._seen:
            last_unix_ns, last_bytes = self._seen[-1]
            if counted_unix_ns <= last_unix_ns:
                return
            if ready_bytes < last_bytes or counted_unix_ns - last_unix_ns > FORGOTTEN_NS:
                self._seen.clear()
                self._rates.clear()
                self._noted = 0
        self._noted += 1
        self._seen.append((counted_unix_ns, ready_bytes))
        if len(self._seen) >= LEAST_REPORTS and (rate := self.bytes_per_s):
            self._rates.append(rate)

    @property
    def bytes_per_s(self) -> float | None:
        """None before two reports, and while nothing comes."""
        if len(self._seen) < 2:
            return None
        (first_unix_ns, first_bytes), (last_unix_ns, last_bytes) = self._seen[0], self._seen[-1]
        return (last_bytes - first_bytes) * 1e9 / (last_unix_ns - first_unix_ns) or None

    @property
    def steady(self) -> bool:
        """True unless a stall, which may be over by now, is among the reports: the rate then says little."""
        rate = self.bytes_per_s
        if rate is None or not self._rates:
            return True
        if self._noted <= 2 * SAMPLES and self._longest_empty_ns >= EMPTY_NS:
            return False
        return max(self._rates) <= STEADY_RATIO * rate

    @property
    def _longest_empty_ns(self) -> int:
        """Longest time among the reports in which no byte came."""
        longest_ns, (since_unix_ns, at_bytes) = 0, self._seen[0]
        for counted_unix_ns, ready_bytes in self._seen:
            if ready_bytes != at_bytes:
                since_unix_ns, at_bytes = counted_unix_ns, ready_bytes
            longest_ns = max(longest_ns, counted_unix_ns - since_unix_ns)
        return longest_ns


def remaining_fetch_s(pending_bytes: int, bytes_per_s: float, since_counted_s: float) -> float:
    """Time until bytes are here that were missing `since_counted_s` ago."""
    return max(0.0, pending_bytes / bytes_per_s - max(0.0, since_counted_s))
