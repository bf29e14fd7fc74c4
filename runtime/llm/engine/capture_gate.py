"""Gate between captures of CUDA graphs and builds of engines in the same process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class CaptureGate:
    """Keeps captures apart from builds. A build waits for the whole device and empties the allocator's cache, and
    neither is allowed beside a capture: it waits for one under way, and none begins until it is done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held during a capture."""
        self._builds = 0

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        with self._lock:
            self._builds += 1
        try:
            yield
        finally:
            with self._lock:
                self._builds -= 1

    @contextlib.contextmanager
    def capturing(self) -> Iterator[bool]:
        """Gives whether a capture may be made now; waits for nothing."""
        free = self._lock.acquire(blocking=False)
        try:
            yield free and not self._builds
        finally:
            if free:
                self._lock.release()


GATE = CaptureGate()
