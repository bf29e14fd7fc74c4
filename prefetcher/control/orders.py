"""Reconciles this node's workers with the controller's orders: starts, updates, drains, kills and forgets them.

`reconcile` decides what to do; `workers.worker` does it for one worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.process.tasks import wait_at_most

from ..workers.node_services import NodeServices
from ..workers.worker import Worker
from .outbox import retries
from .reconcile import (
    Action,
    DrainWorker,
    ForgetWorker,
    KillWorker,
    RejectOrder,
    StandByWorker,
    StartWorker,
    UpdateWorker,
    WakeWorker,
    act_on_order,
    reconcile,
)
from .redis_state import REDIS_ERRORS, NodeState
from .status_publisher import StatusPublisher

log = logging.getLogger(__name__)

REREAD_S = 1.0
COMPARE_NS = 5_000_000_000
"""Interval at which statuses in Redis are compared with those here: what was sent before a network was cut off may
arrive once it is mended, after its deletion over a new connection."""
ENDED_KEPT = 10_000
"""Ids of ended workers that are remembered, some MB: a Redis that lost its last second has no older order again."""


class OrderReconciler:
    """Reads orders and acts on them. `workers` are those that have not ended; `changed` is called when one starts or
    ends."""

    def __init__(
        self,
        *,
        state: NodeState,
        epoch: str,
        services: NodeServices,
        workers: dict[WorkerId, Worker],
        statuses: StatusPublisher,
        changed: Callable[[], None],
        worker_of: Callable[[WorkerOrder, NodeServices], Worker] = Worker,
    ) -> None:
        """`worker_of` makes the worker of an order. Errors: OSError if no port can be opened for its stage."""
        self._state = state
        self._epoch = epoch
        self._services = services
        self._workers = workers
        self._statuses = statuses
        self._changed = changed
        self._worker_of = worker_of
        self._reread = asyncio.Event()
        self._ended_workers: OrderedDict[WorkerId, None] = OrderedDict()
        self._compared_ns = 0
        """Monotonic time at which statuses in Redis were compared last, which may have some that were forgotten here;
        0: with the next read."""

    async def listen(self) -> None:
        """Acts on orders as they are published, until cancelled."""
        async for _ in retries("listening for orders"):
            with contextlib.suppress(*REDIS_ERRORS):
                async for order in self._state.orders():
                    if order is None:
                        self.resync()
                    elif (action := self._action(order)) is not None:
                        self._do(action)

    async def read(self) -> None:
        """Reads all orders once a second, and at once after a new subscription, until cancelled."""
        while True:
            began_ns = time.monotonic_ns()
            with contextlib.suppress(*REDIS_ERRORS):
                if began_ns - self._compared_ns > COMPARE_NS or not self._compared_ns:
                    self._statuses.forget_unknown(await self._state.written_workers())
                    self._compared_ns = began_ns
                orders = await self._state.read_orders()
                known = self._statuses.known_workers()
                for action in reconcile(orders, known, self._ended_workers, self._epoch, began_ns):
                    self._do(action)
            await wait_at_most(self._reread, REREAD_S)
            self._reread.clear()

    def _action(self, order: WorkerOrder) -> Action | None:
        return act_on_order(order, self._statuses.known_workers(), self._ended_workers, self._epoch)

    def resync(self) -> None:
        """Publishes all statuses and reads all orders again: after a new subscription or an outage."""
        self._statuses.republish_all()
        self._compared_ns = 0
        self._reread.set()

    def _do(self, action: Action) -> None:
        match action:
            case StartWorker(order):
                self._start(order)
            case RejectOrder(order, reason):
                log.info("order rejected", extra={"worker": order.worker, "reason": reason})
                self._statuses.publish_end(order)
            case UpdateWorker(order):
                if order.worker in self._workers:
                    self._workers[order.worker].update(order)
            case StandByWorker(worker):
                if worker in self._workers:
                    self._workers[worker].stand_by()
            case WakeWorker(worker):
                if worker in self._workers:
                    self._workers[worker].wake()
            case DrainWorker(worker):
                if worker in self._workers:
                    self._workers[worker].drain()
            case KillWorker(worker):
                if worker in self._workers:
                    self._workers[worker].kill()
            case ForgetWorker(worker):
                self._statuses.forget(worker)

    def _start(self, order: WorkerOrder) -> None:
        try:
            worker = self._worker_of(order, self._services)
        except OSError as error:
            reason = f"node {self._services.node} cannot open a port for a stage: {error}"
            self._statuses.publish_end(order, Unavailable(reason, retry_after_s=1.0))
            return
        self._workers[order.worker] = worker
        worker.start().add_done_callback(lambda _: self._ended(order.worker))
        self._changed()

    def _ended(self, worker: WorkerId) -> None:
        self._workers.pop(worker, None)
        self._ended_workers[worker] = None
        if len(self._ended_workers) > ENDED_KEPT:
            self._ended_workers.popitem(last=False)
        self._services.segments.budget.memory.replenish()
        self._changed()
