"""Silence of gateways: whether the holder of a claim is silent, so that another may take the key and run the call
again. Pure.

A claim does not end with a clock: Redis may have stood still, and its clock gone on, while the call runs. Who waits for
it sees its renewals instead, as its time left in Redis jumps up. The gateway is silent when there was no renewal for
`SILENT_MS` by Redis' clock, and the last `WATCHED_S` of these were watched without a gap, at a Redis that took writes:
a gateway renews within that time after Redis came back. One that stands still for longer, and not for ever, finds at
its next renewal that its claim was taken, and gives its call up.
"""

from __future__ import annotations

RENEW_S = 1.5
RUNNING_MS = 3_600_000
"""Life of a claim from its last renewal, should nobody ask for its key."""
SILENT_MS = 10_000
WATCHED_S = 5.0
KEPT_SILENT_MS = 4_000
KEPT_WATCHED_S = 2.0
"""The same for a call whose answer its worker keeps: it does not run again, so a wrong guess does no harm."""
GAP_S = 1.0
"""Time between two looks beyond which the watch begins again: the watcher, or its Redis, stood still."""


class SilenceWatch:
    """The looks of one waiting call at the claim that it waits for."""

    def __init__(self) -> None:
        self._left_ms = -1
        self._looked_s = 0.0
        self._since_s = 0.0

    def look(self, left_ms: int, now_s: float, *, refused: bool = False) -> None:
        """Looks at the claim. `refused`: Redis refuses writes, so that no gateway can renew."""
        if refused or left_ms > self._left_ms or now_s - self._looked_s > GAP_S:
            self._since_s = now_s
        self._left_ms, self._looked_s = left_ms, now_s

    def silent(self, silent_ms: int = SILENT_MS, watched_s: float = WATCHED_S) -> bool:
        """Checks whether the gateway is silent, by the last look."""
        return RUNNING_MS - self._left_ms >= silent_ms and self._looked_s - self._since_s >= watched_s
