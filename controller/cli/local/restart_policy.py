"""When a process that died is started again: at once the first time, then later and later.

One death is an accident, and callers are waiting: nothing may delay it. Many in a row are a fault that a
restart does not mend, and must not eat the machine.
"""

from __future__ import annotations

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
"""Not longer, because what is missing (a Redis elsewhere, room on a disk) may come back at any time."""
STEADY_S = 30.0
"""A process that lived this long was well: its next death is a first one again."""


class RestartPolicy:
    """Deaths and the time go in, the delay until the next start comes out."""

    def __init__(self) -> None:
        self.deaths_in_a_row = 0

    def died(self, *, lived_s: float) -> float:
        if lived_s >= STEADY_S:
            self.deaths_in_a_row = 0
        self.deaths_in_a_row += 1
        if self.deaths_in_a_row == 1:
            return 0.0
        # The exponent is bounded: a process that fails for weeks must not overflow a float.
        return float(min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self.deaths_in_a_row - 2, 16)))
