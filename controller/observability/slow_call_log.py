"""The slow-call log: a line for each call that waited for a start or failed, with its phases.

Written in the call's own context, so that the line has its request id and its trace. Other calls have none: the
ledger has their row.
"""

from __future__ import annotations

import logging
import time

from fleetstart.runtime.contract.billing.ledger import InvocationTrace
from fleetstart.runtime.contract.process.token_bucket import TokenBucket

log = logging.getLogger(__name__)

LINES_PER_S = 10
"""Sustained rate limit of these lines."""
BURST_LINES = 100


class SlowCallLog:
    def __init__(self) -> None:
        self._lines = TokenBucket(per_s=LINES_PER_S, burst=BURST_LINES)

    def ended(self, trace: InvocationTrace) -> None:
        row = trace.row
        failed = row.status >= 500
        if not failed and (row.start == "hot" or not row.worker):
            return
        if not self._lines.try_take(time.monotonic()):
            return
        phases = {phase.name: round(trace.timeline.total_ms(phase.name), 1) for phase in trace.timeline.phases}
        dropped = self._lines.pop_refused()
        skipped = {"lines_skipped": dropped} if dropped else {}
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
