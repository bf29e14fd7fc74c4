"""The scheduler's loop: holds the leader lease, runs a reconcile step on each change, and writes its result.

Every controller runs one; only the one with the lease steps. It wakes on any change of the view, so that demand
becomes an order within a millisecond or two, and when time alone changes something. The agenda says for which versions;
where they are many, a step takes some of them, and the loop is free between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.process.tasks import run_all, wait_at_most

from ..billing.ledger_writer import LedgerWriter
from ..peers.pool import ParameterPool, PeerKeys
from ..state.records import VersionKey
from ..state.redis_client import REDIS_ERRORS
from .agenda import Agenda
from .leader import LeaderLease
from .reconcile import Reconciler
from .start_orders import planned_peers
from .step import Step
from .volume_mounts import with_mounts

log = logging.getLogger(__name__)

TICK_S = 1.0
RENEW_S = 0.5
ABANDONED_EVERY_S = 5.0
RETRY_S = 0.1
"""Pause after orders could not be written. What wakes the scheduler does not end it: it reads all before it tries
again, which wakes it."""


class Scheduler:
    def __init__(
        self,
        gateway: str,
        lease: LeaderLease,
        ledger: LedgerWriter,
        seal: Callable[[WorkerOrder], WorkerOrder],
        peer_keys: PeerKeys,
    ) -> None:
        """`seal` adds secrets to an order, encrypted for its node; `peer_keys` sign leave to read from peers."""
        self._gateway = gateway
        self._lease = lease
        self._view = lease.view
        self._ledger = ledger
        self._seal = seal
        self._peer_keys = peer_keys
        self._wake = asyncio.Event()
        self._reconciler = Reconciler()
        self._agenda = Agenda(lease.view)
        self.pool = ParameterPool(lease.view, peer_keys)
        """Copies and sources of weights, as far as this controller decides about them."""
        self.fence = 0
        """Fencing token; 0 while another controller schedules, or it is not known which."""
        self._caught_up = 0
        """The fencing token with which it has read what was written before; 0 if a write of its own may be lost."""
        self.unplaced: dict[VersionKey, ErrorInfo] = {}
        """Versions whose workers could not be placed when they were looked at last, with the reason."""
        self._faults: dict[VersionKey, str] = {}
        self._pool_error = ""
        lease.view.on_change(self._wake.set)

    def wake(self) -> None:
        self._wake.set()

    def use_peer_keys(self, peer_keys: PeerKeys) -> None:
        """Signs with other keys from now on."""
        self._peer_keys = peer_keys
        self.pool = ParameterPool(self._view, peer_keys)

    async def run(self) -> None:
        await run_all(self._hold_lease(), self._steps(), self._close_abandoned())

    async def release(self) -> None:
        """Gives the lease up, so that another controller can schedule at once."""
        if self.fence:
            self.fence = 0
            await self._lease.release(self._gateway)

    async def _hold_lease(self) -> None:
        while True:
            try:
                async with asyncio.timeout(RENEW_S * 2):
                    fence = await self._lease.acquire_or_renew(self._gateway, self.fence)
                self._take(fence)
            except REDIS_ERRORS:
                pass  # without Redis no other controller can lead; a stale fence is rejected anyway
            await asyncio.sleep(RENEW_S)

    def _take(self, fence: int) -> None:
        if fence == self.fence:
            return
        if fence:
            log.info("this controller schedules", extra={"fence": fence})
            self._reconciler, self._agenda = Reconciler(), Agenda(self._view)
            self.pool = ParameterPool(self._view, self._peer_keys)
            self.unplaced = {}
            self._wake.set()
        else:
            log.warning("another controller schedules", extra={"leader": self._view.leader})
        self.fence = fence

    async def _steps(self) -> None:
        wait_s = TICK_S
        while True:
            await wait_at_most(self._wake, wait_s)
            self._wake.clear()
            wait_s = TICK_S
            if not self.fence or self._view.redis != "ok":
                continue
            agenda = self._agenda
            try:
                await self._step(agenda)
                await self._pool_step()
            except REDIS_ERRORS as error:
                log.warning("orders cannot be written: redis is unavailable", extra={"error": str(error)})
                self._caught_up = 0  # they may be written, though the answer was lost: read before the next decision
                await asyncio.sleep(RETRY_S)
                self._wake.set()
                continue
            wait_ns = agenda.wait_ns(time.monotonic_ns())
            if wait_ns is not None:
                wait_s = max(0.001, min(TICK_S, wait_ns / 1e9))

    async def _step(self, agenda: Agenda) -> None:
        fence = self.fence
        if fence != self._caught_up:
            await self._lease.catch_up()
            self._caught_up = fence
        now_ns = time.monotonic_ns()
        keys = agenda.take(now_ns)
        if not keys:
            return
        step = self._reconciler.step(self._view, now_ns=now_ns, now_unix_ns=time.time_ns(), keys=keys)
        step.orders = [with_mounts(self._view, self._seal(order)) for order in step.orders]
        step.orders = self._with_sources(step)
        try:
            written = await self._lease.write(step, fence)
        except REDIS_ERRORS:
            agenda.again(keys)
            raise
        if not written:
            self._rejected(fence)
            return
        agenda.done(step.rests, step.unplaced.keys(), now_ns)
        self.unplaced = {key: why for key, why in self.unplaced.items() if key not in step.rests} | step.unplaced
        self._log_faults(step)
        _log_step(step)

    async def _pool_step(self) -> None:
        """Writes what follows from who holds which weights: sources, copies, peer keys."""
        fence = self.fence
        if not fence or fence != self._caught_up:
            return
        try:
            changes = self.pool.step(time.monotonic_ns(), time.time_ns())
        except Exception as error:
            self._pool_fault(error)
            return
        if not changes:
            return
        if not await self._lease.write(Step(orders=changes.orders, pool=changes), fence):
            self._rejected(fence)
            return
        for copy in (*changes.copies, *changes.deleted_copies):
            log.info(
                "copy ordered" if copy in changes.copies else "copy taken back",
                extra={"node": copy.node, "checkpoint": copy.checkpoint[:12], "peers": len(copy.peers)},
            )

    def _with_sources(self, step: Step) -> list[WorkerOrder]:
        """The orders of a step with peers to read from, first those that the plan names. Without any, weights come from
        the store."""
        orders = step.orders
        try:
            return self.pool.with_sources(orders, time.time_ns(), planned_peers(orders, step.plans))
        except Exception as error:
            self._pool_fault(error)
            return orders

    def _pool_fault(self, error: Exception) -> None:
        """Begins the pool anew: what it cannot decide about must not stop the orders of workers."""
        if repr(error) != self._pool_error:
            log.error("sources and copies of weights cannot be decided", exc_info=error)
        self._pool_error = repr(error)
        self.pool = ParameterPool(self._view, self._peer_keys)

    def _rejected(self, fence: int) -> None:
        log.warning("orders were rejected: another controller schedules", extra={"fence": fence})
        self.fence = 0

    def _log_faults(self, step: Step) -> None:
        """Logs each fault once, as long as it lasts."""
        for key, error in step.faults.items():
            if self._faults.get(key) != repr(error):
                log.error("a version could not be scheduled", extra={"function": str(key)}, exc_info=error)
        still = {key: text for key, text in self._faults.items() if key not in step.rests}
        self._faults = still | {key: repr(error) for key, error in step.faults.items()}

    async def _close_abandoned(self) -> None:
        while True:
            await asyncio.sleep(ABANDONED_EVERY_S)
            if self.fence:
                with contextlib.suppress(*REDIS_ERRORS):
                    await self._ledger.close_abandoned(own=self._gateway, now_ns=time.monotonic_ns())


def _log_step(step: Step) -> None:
    for story in step.impossible:
        log.error("a worker was in an impossible state; its order is deleted", extra={"story": story})
    for order in step.orders:
        log.info(
            "worker ordered" if order.wanted == "run" else "worker drained",
            extra={
                "worker": order.worker,
                "function": order.spec.name,
                "version": order.version,
                "node": order.node,
                **({"request": order.cause} if order.cause and order.wanted == "run" else {}),
            },
        )
    for key, failure in step.failures:
        if failure is not None:
            log.warning(
                "a start failed", extra={"function": str(key), "count": failure.count, "error": failure.error.message}
            )
