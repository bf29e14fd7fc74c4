"""Reads that must not be felt: what streams in behind a pipeline's back shares its link with the activations.

Whatever lies in the queue before the link, every packet behind it waits for. So the store may never have more under
way than a short burst: the receive buffer is small, which bounds what a new request may send at once, and reads
come in small portions, evenly, somewhat slower than the link: the buffer stays full on this side, the store sends
one portion whenever one was read, and the queue holds no more than that. A sleep between large reads would not do:
each read would let a whole window loose (HydraServe section 6.2 gives the background a low priority on the device;
this is the same for the network, which knows none). While somebody waits for bytes of any segment, they hold still
but for a trickle, which keeps their connections.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHARE = 0.8
"""Of what the source was measured to give: the rest is for those who wait."""
PORTION_S = 0.001
"""Of the link's time, and so what a packet may find before it."""
PORTION_BYTES = (16 * 1024, 256 * 1024)
WINDOW_S = 0.004
"""Of the link's time: what a new request may send at once. As long as that may a round trip take at full pace."""
WINDOW_BYTES = (64 * 1024, 4 * 1024 * 1024)
CREDIT_S = 0.005
"""Of time that was lost, by a sleep that took longer or between two requests, so much is made up for."""
TRICKLE_S = 1.0
"""Between two portions while others wait for theirs: a store ends connections on which nothing is taken."""
LOOK_S = 0.02
"""How soon a read that holds still notices that it is stopped."""


class BackgroundThrottle:
    """One a node: reads of several segments together keep to it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._urgent = 0
        self._bytes_per_s = 0.0
        self._next_s = 0.0

    def set_measured(self, bytes_per_s: float) -> None:
        """So fast is the source when nobody holds back. Before that is known only portions are small."""
        with self._lock:
            self._bytes_per_s = bytes_per_s * SHARE

    @property
    def portion_bytes(self) -> int:
        """To read at once."""
        least, most = PORTION_BYTES
        return min(most, max(least, int(self._bytes_per_s * PORTION_S)))

    @property
    def window_bytes(self) -> int:
        """For the receive buffer of a connection."""
        least, most = WINDOW_BYTES
        return min(most, max(least, int(self._bytes_per_s * WINDOW_S)))

    def delay_s(self, size_bytes: int, now_s: float) -> float:
        """How long to wait before or after so many bytes are read; they are counted."""
        with self._lock:
            if not self._bytes_per_s:
                return 0.0
            begin_s = max(self._next_s, now_s - CREDIT_S)
            self._next_s = begin_s + size_bytes / self._bytes_per_s
            return max(0.0, begin_s - now_s)

    @contextmanager
    def urgent(self, awaited: bool = True) -> Iterator[None]:
        """While somebody waits for what is read inside, paced reads hold still."""
        with self._lock:
            self._urgent += awaited
        try:
            yield
        finally:
            with self._free:
                self._urgent -= awaited
                if not self._urgent:
                    self._free.notify_all()

    def wait(self, size_bytes: int, stopped: Callable[[], bool]) -> None:
        """After so many bytes were read, until more may be, or none shall be."""
        until_s = time.monotonic() + TRICKLE_S
        with self._free:
            while self._urgent and not stopped() and (left_s := until_s - time.monotonic()) > 0:
                self._free.wait(min(left_s, LOOK_S))
        delay_s = self.delay_s(size_bytes, time.monotonic())
        if delay_s > 0:
            time.sleep(delay_s)
