"""The time that the daemon's loop spends on reading what workers send: fair between them, and bounded for all.

A turn of one worker is a millisecond. Each worker has a small share of the loop of its own, so that one that sends
little is heard at once; who sends more shares the rest with all others that do. What is used up is not read for a
moment: the worker's pipe or socket fills, and its own writes wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TURN_S = 0.001
OWN_SHARE, OWN_BURST_S = 0.02, 0.02
ALL_SHARE, ALL_BURST_S = 0.2, 0.05
"""Shares of the loop's time, and what may be used at once after a rest."""
PAUSE_S = 0.02
"""Pause of a reader whose time is used up."""


class TimeShare:
    """A share of a clock's time that refills. It may be overdrawn by one turn."""

    def __init__(self, share: float, burst_s: float) -> None:
        self._share, self._burst_s = share, burst_s
        self._left_s = burst_s
        self._seen_s = 0.0

    def has_time(self, now_s: float) -> bool:
        self._left_s = min(self._burst_s, self._left_s + (now_s - self._seen_s) * self._share)
        self._seen_s = now_s
        return self._left_s > 0

    def spend(self, took_s: float) -> None:
        self._left_s -= took_s


class ReadBudget:
    """The budget of all readers of a loop."""

    def __init__(self) -> None:
        self._all = TimeShare(ALL_SHARE, ALL_BURST_S)

    def own_share(self) -> WorkerShare:
        """The share of one worker, for all that is read of it."""
        return WorkerShare(self._all)


class WorkerShare:
    def __init__(self, of_all: TimeShare) -> None:
        self._all = of_all
        self._own = TimeShare(OWN_SHARE, OWN_BURST_S)

    def may_read(self, now_s: float) -> bool:
        return self._own.has_time(now_s) or self._all.has_time(now_s)

    def spend(self, took_s: float, now_s: float) -> None:
        (self._own if self._own.has_time(now_s) else self._all).spend(took_s)


class FairReader:
    """Reads one descriptor of a worker, in turns. `read` reads a piece, and returns whether there may be more."""

    def __init__(self, fd: int, read: Callable[[], bool], share: WorkerShare, *, most_reads: int) -> None:
        self._fd = fd
        self._piece = read
        self._share = share
        self._most_reads = most_reads
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        self._closed = False
        self._loop.add_reader(fd, self._turn)

    def close(self) -> None:
        """Ends the reading; the descriptor is its owner's."""
        if not self._closed:
            self._closed = True
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            if self._again is not None:
                self._again.cancel()

    def _turn(self) -> None:
        begun_s = time.monotonic()
        if not self._share.may_read(begun_s):
            self._loop.remove_reader(self._fd)
            self._again = self._loop.call_later(PAUSE_S, self._resume)
            return
        for _ in range(self._most_reads):
            more = self._piece()
            now_s = time.monotonic()
            if not more or self._closed or now_s - begun_s > TURN_S:
                break
        self._share.spend(now_s - begun_s, now_s)

    def _resume(self) -> None:
        self._again = None
        if not self._closed:
            self._loop.add_reader(self._fd, self._turn)
