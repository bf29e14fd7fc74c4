"""Throttles background reads, which share the link with the pipeline's activations and must not delay them.

Every packet waits behind what is queued before the link. So the store may never have more in flight than a short
burst: the receive buffer is small, which bounds what a new request may send at once, and reads come in small
portions, evenly, somewhat slower than the link: the buffer stays full on this side, the store sends one portion
whenever one was read, and the queue holds no more than that. A store whose round trip is longer than a window lasts
gets more connections, until all together keep to the rate: so many windows are what the link itself holds. A sleep
between large reads would not do: each read would release a whole window (HydraServe section 6.2 gives the background a
low priority on the device; this is the same for the network, which has no priorities). While wanted chunks of any
segment are being read, background reads pause but for a trickle, which keeps their connections.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHARE = 0.8
"""Rate of background reads, as a share of the measured bandwidth."""
PORTION_S = 0.001
"""Size of a portion in link time, and so the delay that a packet may find before it."""
PORTION_BYTES = (16 * 1024, 256 * 1024)
WINDOW_S = 0.004
"""Receive window in link time: what a new request may send at once. At full rate, a round trip may take as long."""
WINDOW_BYTES = (64 * 1024, 4 * 1024 * 1024)
CREDIT_S = 0.005
"""Lost time that is made up for: after a sleep that took longer, or between two requests."""
CONNECTIONS_MOST = 8
"""Connections of background reads. Each more lets other packets wait for a portion more: on a link of 200 Mbit/s one in
a hundred packets of other connections waited 13 ms with two where one had sufficed, and 4 ms with one."""
LOST_SHARE = 0.2
"""Share of the time in which the rate was missed, from which on one connection more is used."""
LEARN_S = 0.5
"""Time of reading over which that is measured."""
IDLE_S = 1.0
"""Gap between two reads that says nothing of the rate: nothing was to be read."""
TRICKLE_S = 1.0
"""Interval of portions during a pause: a store closes connections that are not read."""
LOOK_S = 0.02
"""Interval at which a paused read checks whether it is stopped."""


class BackgroundThrottle:
    """The throttle of a node: background reads of all segments together keep to it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._urgent = 0
        self._bytes_per_s = 0.0
        self._next_s = 0.0
        self._connections = 1
        self._read_s = self._lost_s = 0.0
        """Time of reading since the connections were counted last, and the part of it that the rate was missed by."""

    def set_measured(self, bytes_per_s: float) -> None:
        """Sets the bandwidth measured without throttling. Before the first measurement only portions are small."""
        with self._lock:
            self._bytes_per_s = bytes_per_s * SHARE

    @property
    def portion_bytes(self) -> int:
        """Bytes to read at once."""
        least, most = PORTION_BYTES
        return min(most, max(least, int(self._bytes_per_s * PORTION_S)))

    @property
    def window_bytes(self) -> int:
        """Size of a connection's receive buffer."""
        least, most = WINDOW_BYTES
        return min(most, max(least, int(self._bytes_per_s * WINDOW_S)))

    def connections(self) -> int:
        """Connections that it takes to read at the rate, as far as that is known."""
        return self._connections

    def delay_s(self, size_bytes: int, now_s: float) -> float:
        """Counts so many bytes and returns how long to wait before or after reading them."""
        with self._lock:
            if not self._bytes_per_s:
                return 0.0
            begin_s = max(self._next_s, now_s - CREDIT_S)
            takes_s = size_bytes / self._bytes_per_s
            self._learn(begin_s - self._next_s, takes_s)
            self._next_s = begin_s + takes_s
            return max(0.0, begin_s - now_s)

    def _learn(self, lost_s: float, takes_s: float) -> None:
        """Counts how much of the time was lost because no bytes were there to read."""
        if lost_s > IDLE_S:
            return
        self._read_s += lost_s + takes_s
        self._lost_s += lost_s
        if self._read_s >= LEARN_S:
            if self._lost_s > LOST_SHARE * self._read_s:
                self._connections = min(self._connections + 1, CONNECTIONS_MOST)
            self._read_s = self._lost_s = 0.0

    @contextmanager
    def urgent(self, awaited: bool = True) -> Iterator[None]:
        """Pauses background reads while the block runs, if `awaited`."""
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
        """Waits after so many bytes were read, until more may be read or the read is stopped."""
        until_s = time.monotonic() + TRICKLE_S
        with self._free:
            paused = self._urgent
            while self._urgent and not stopped() and (left_s := until_s - time.monotonic()) > 0:
                self._free.wait(min(left_s, LOOK_S))
            if paused:
                self._next_s = max(self._next_s, time.monotonic())  # a pause is no lost time
        delay_s = self.delay_s(size_bytes, time.monotonic())
        if delay_s > 0:
            time.sleep(delay_s)
