"""The node's lease in Redis, and what it reports of itself with it: each second, and at once when that changed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from fleetstart.runtime.contract.node.reports import NodeReport

from .redis_state import LEASE_MS, REDIS_ERRORS, NodeState

log = logging.getLogger(__name__)

RENEW_S = LEASE_MS / 3000
RETRY_S = 0.2
"""Between renewals that fail."""


class NodeLease:
    """`back` is called when Redis is back after it was away."""

    def __init__(self, state: NodeState, report: Callable[[], NodeReport], back: Callable[[], None]) -> None:
        self._state = state
        self._report = report
        self._back = back
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """There is something new to report."""
        self._changed.set()

    async def renew(self) -> None:
        """Until cancelled."""
        was_away = False
        while True:
            self._changed.clear()
            try:
                await self._state.renew(self._report())
                if was_away:
                    log.warning("Redis is back, writing everything again")
                    self._back()
                was_away = False
            except REDIS_ERRORS as error:
                if not was_away:
                    log.warning("Redis is away, workers run on", extra={"error": str(error)})
                was_away = True
                await asyncio.sleep(RETRY_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._changed.wait()
