"""The node's lease in Redis and the report written with it: every second, and at once when the report has changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fleetstart.runtime.contract.node.reports import NodeReport
from fleetstart.runtime.contract.process.tasks import wait_at_most

from .lease_keeper import LeaseKeeper
from .redis_state import LEASE_MS, REDIS_ERRORS, NodeState

log = logging.getLogger(__name__)

RENEW_S = LEASE_MS / 3000
RETRY_S = 0.2
"""Pause after a renewal that failed."""


class NodeLease:
    """Keeps the lease. `back` is called when Redis is available again after an outage."""

    def __init__(
        self,
        state: NodeState,
        report: Callable[[], NodeReport],
        back: Callable[[], None],
        keeper: LeaseKeeper | None = None,
    ) -> None:
        """`keeper` extends the lease while the loop is late."""
        self._state = state
        self._keeper = keeper
        self._report = report
        self._back = back
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Renews the lease at once, because there is something new to report."""
        self._changed.set()

    async def renew(self) -> None:
        """Renews the lease until cancelled."""
        was_down = False
        while True:
            self._changed.clear()
            try:
                lease = await self._state.renew(self._report())
                if self._keeper is not None:
                    self._keeper.wrote(lease)
                if was_down:
                    log.warning("Redis is available again: writing all state again")
                    self._back()
                was_down = False
            except REDIS_ERRORS as error:
                if not was_down:
                    log.warning("Redis is unavailable: workers keep running", extra={"error": str(error)})
                was_down = True
                await asyncio.sleep(RETRY_S)
                continue
            await wait_at_most(self._changed, RENEW_S)
