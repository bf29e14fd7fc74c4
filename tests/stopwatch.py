"""Seconds that a machine with cores to spare would have taken: bounds in tests hold beside other work, too."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

PRESSURE = Path("/proc/pressure/cpu")
EXCUSED_SHARE = 0.75
"""At most this share of what passed is excused, however busy the machine is: what hangs is found."""


class Stopwatch:
    """Clock that counts from its making on, and excuses the time in which the kernel saw processes wait for a core."""

    def __init__(self) -> None:
        self._begun_s, self._waited_s = time.monotonic(), waited_for_cores_s()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s

    @property
    def unhindered_s(self) -> float:
        """Elapsed seconds without those in which something waited for a core."""
        elapsed_s = self.elapsed_s
        return elapsed_s - min(waited_for_cores_s() - self._waited_s, EXCUSED_SHARE * elapsed_s)


def waited_for_cores_s() -> float:
    """Seconds since boot in which some process could run and had no core. 0 where the kernel does not count them."""
    with contextlib.suppress(OSError):
        for word in PRESSURE.read_text().partition("\n")[0].split():
            if word.startswith("total="):
                return int(word.removeprefix("total=")) / 1e6
    return 0.0
