"""Reports the numbers of waiting and running calls of this gateway to the schedulers, under a lease.

A call that found no free slot is reported at once; other changes are gathered. The scheduler in this process gets the
report without Redis in between, so its orders go out while the report is still on its way to others.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.node.reports import GatewayReport
from fleetstart.runtime.contract.process.tasks import wait_at_most

from ..state.redis_client import REDIS_ERRORS
from ..state.sync import StateSync
from ..state.view import GATEWAY_LEASE_MS
from .app import Gateway

log = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
"""Renewal of the lease, and so the delay of a report on more calls that did not have to wait."""
MIN_INTERVAL_S = 0.02
"""Least time between two publications: a burst of calls is one report."""


class LoadReporter:
    def __init__(self, state: StateSync, client: redis.Redis) -> None:
        self._state = state
        self._client = client
        self._wake = asyncio.Event()
        self._scheduled = False
        self.gateway: Gateway | None = None

    def report_now(self) -> None:
        """Reports at once: this process' scheduler sees it in this turn of the loop, others within milliseconds."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._report_here)

    def report_soon(self) -> None:
        self._wake.set()

    def _report_here(self) -> None:
        self._scheduled = False
        if self.gateway is not None:
            self._apply(self.gateway.report())
            self._wake.set()

    def _apply(self, report: GatewayReport) -> None:
        self._state.view.put_gateway(report, time.monotonic_ns())
        self._state.view.changed()

    async def run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self.publish()
            except REDIS_ERRORS as error:
                log.debug("gateway report not published", extra={"error": str(error)})
            await asyncio.sleep(MIN_INTERVAL_S)
            await wait_at_most(self._wake, REPORT_EVERY_S)

    async def publish(self) -> None:
        if self.gateway is None:
            return
        report = self.gateway.report()
        self._apply(report)
        raw = msgspec.json.encode(report)
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.set(keys.gateway(self.gateway.id), raw, px=GATEWAY_LEASE_MS)
            pipe.publish(keys.EVENTS_GATEWAYS, raw)
            self.gateway.published()
            await pipe.execute()
        self._state.view.written_ns = time.monotonic_ns()

    async def withdraw(self) -> None:
        """Publishes the last report: nothing waits or runs here any more."""
        if self.gateway is not None:
            empty = GatewayReport(gateway=self.gateway.id)
            await self._client.publish(keys.EVENTS_GATEWAYS, msgspec.json.encode(empty))
            await self._client.delete(keys.gateway(self.gateway.id))
