"""Restart policy of the supervisor: the first restart at once, later ones with exponential backoff.

One death is an accident, and callers are waiting: nothing may delay the restart. Many in a row are a fault that a
restart does not repair, and must not exhaust the machine.
"""

from __future__ import annotations

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
"""Longest delay: what is missing (a Redis elsewhere, disk space) may come back at any time."""
STEADY_S = 30.0
"""A process that lived this long was healthy: its next death counts as the first again."""


class RestartPolicy:
    """Counts deaths of one process, and computes the delay until its restart."""

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
