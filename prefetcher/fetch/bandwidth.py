"""Measured bandwidth of each source, smoothed; reported to the scheduler.

Time counts while at least one read is in progress, so that several threads count as one stream and idle time is not
slowness.
"""

from __future__ import annotations

import threading
import time
from collections import Counter

from fleetstart.runtime.contract.process.moving_average import MovingAverage

WEIGHT = 0.3
"""Weight of a new measurement; a handful of fetches outweigh what was before."""
LEAST_BYTES = 16 * 1024 * 1024
"""Smaller transfers measure round trips."""

PEERS_MAX = 256
"""Peers whose rates are kept: each is in the node's reports."""


def kind_of(source: str) -> str:
    """The kind of a source, in which reports sum them up: "peer" of peer:NODE."""
    return source.partition(":")[0]


class Stopwatch:
    """Bytes transferred, and the time in which any transfer was in progress. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._since_s = 0.0
        self.busy_s = 0.0
        self.size_bytes = 0

    def begin(self) -> None:
        with self._lock:
            if self._under_way == 0:
                self._since_s = time.monotonic()
            self._under_way += 1

    def end(self, size_bytes: int) -> None:
        with self._lock:
            self._under_way -= 1
            self.size_bytes += size_bytes
            if self._under_way == 0:
                self.busy_s += time.monotonic() - self._since_s


class FetchedBytes:
    """Bytes by source since the daemon started. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()

    def note(self, source: str, size_bytes: int) -> None:
        with self._lock:
            self._sums[source] += size_bytes

    def sums(self) -> dict[str, int]:
        with self._lock:
            return dict(self._sums)


class Bandwidths:
    """Bytes a second by source, of peers those that were read from last. Not thread-safe."""

    def __init__(self) -> None:
        self._rates: dict[str, MovingAverage] = {}

    def note(self, source: str, size_bytes: int, busy_s: float) -> None:
        """Of a peer, notes the rate of all peers too."""
        if size_bytes < LEAST_BYTES or busy_s <= 0:
            return
        for name in dict.fromkeys((source, kind_of(source))):
            self._rates[name] = self._rates.pop(name, MovingAverage()).fold(size_bytes / busy_s, WEIGHT)
        if len(peers := [name for name in self._rates if name != kind_of(name)]) > PEERS_MAX:
            del self._rates[peers[0]]

    def bytes_per_s(self) -> dict[str, float]:
        return {source: rate.value for source, rate in self._rates.items()}
