"""A line in the controller's log for each call that waited for a start or failed, with where its time went.

Written in the call's own context, so that the line has its request id and its trace. Calls that went well and quickly
have none: the ledger has their row.
"""

from __future__ import annotations

import logging
import time

from fleetstart.runtime.contract.billing.ledger import InvocationTrace

log = logging.getLogger(__name__)

LINES_PER_S = 10
"""Sustained: a system in trouble must not spend itself on saying so."""
BURST_LINES = 100


class SlowCallLog:
    def __init__(self) -> None:
        self._left = float(BURST_LINES)
        self._at_s = time.monotonic()
        self._skipped = 0

    def ended(self, trace: InvocationTrace) -> None:
        row = trace.row
        failed = row.status >= 500
        if not failed and (row.start == "hot" or not row.worker):
            return
        if not self._may_say():
            return
        phases = {phase.name: round(trace.timeline.total_ms(phase.name), 1) for phase in trace.timeline.phases}
        skipped = {"lines_skipped": self._skipped} if self._skipped else {}
        self._skipped = 0
        log.log(
            logging.WARNING if failed else logging.INFO,
            "an invocation failed" if failed else "an invocation waited for a start",
            extra={
                "invocation": row.id,
                "function": f"{row.function}@{row.version}",
                "status": row.status,
                "error": row.error,
                "start": row.start,
                "worker": row.worker,
                "phases_ms": phases,
                **skipped,
            },
        )

    def _may_say(self) -> bool:
        now_s = time.monotonic()
        self._left = min(BURST_LINES, self._left + (now_s - self._at_s) * LINES_PER_S)
        self._at_s = now_s
        if self._left < 1:
            self._skipped += 1
            return False
        self._left -= 1
        return True
