"""The bounded queue of a version's waiting calls, and the mean of their service times.

First in, first out. A call that is tried again (its worker was full, draining, or died) goes to the front: it has
waited longest. Calls past their deadline are skipped. A full queue rejects at once; `admission.rejections` words it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from fleetstart.runtime.contract.process.moving_average import MovingAverage

QUEUE_LIMIT = 1000
"""Most calls that wait for one version. Far more than any worker clears within a usual timeout."""
BODY_BUDGET_FACTOR = 8
"""Most bytes of bodies that a gateway holds, in multiples of the largest body allowed: bounds its memory."""
SERVICE_CALLS = 25
"""That the mean of service times counts: fewer, and a wait that is predicted from it is off by chance alone."""


class HasDeadline(Protocol):
    @property
    def deadline_ns(self) -> int: ...


Entry = TypeVar("Entry", bound=HasDeadline)


class CallQueue(Generic[Entry]):
    def __init__(self, limit: int = QUEUE_LIMIT) -> None:
        self._limit = limit
        self._entries: OrderedDict[Entry, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries))

    @property
    def full(self) -> bool:
        return len(self._entries) >= self._limit

    def offer(self, entry: Entry) -> bool:
        """Appends an entry; False if the queue is full."""
        if self.full:
            return False
        self._entries[entry] = None
        return True

    def put_back(self, entry: Entry) -> None:
        """Puts an entry at the front, even if the queue is full: it was admitted already."""
        self._entries[entry] = None
        self._entries.move_to_end(entry, last=False)

    def take(self, now_ns: int) -> Entry | None:
        """Removes and returns the first entry before its deadline; None if there is none."""
        while self._entries:
            entry, _ = self._entries.popitem(last=False)
            if entry.deadline_ns > now_ns:
                return entry
        return None

    def remove(self, entry: Entry) -> None:
        self._entries.pop(entry, None)


class ServiceTime:
    """Mean service time of a version's calls: a moving average over the last SERVICE_CALLS or so."""

    def __init__(self) -> None:
        self._mean = MovingAverage()

    def observe(self, took_s: float) -> None:
        self._mean = self._mean.fold(took_s, 1 / SERVICE_CALLS)

    @property
    def mean_s(self) -> float:
        return self._mean.value

    @property
    def seen(self) -> int:
        return self._mean.count
