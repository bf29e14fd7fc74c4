"""Publishes the statuses of this node's workers, from a worker's order until the controller has seen its end."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus

from .outbox import Outbox
from .reconcile import KnownWorker


class StatusPublisher:
    """Latest status of each worker; written by the outbox."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._statuses: dict[WorkerId, WorkerStatus] = {}
        self._seen_ns: dict[WorkerId, int] = {}
        self._number = 0

    def known_workers(self) -> dict[WorkerId, KnownWorker]:
        """Workers of this node as the reconciler sees them."""
        return {
            worker: KnownWorker(state=status.state, seen_ns=self._seen_ns[worker])
            for worker, status in self._statuses.items()
        }

    def publish(self, status: WorkerStatus) -> None:
        self._number += 1
        status = msgspec.structs.replace(status, number=self._number)
        self._seen_ns.setdefault(status.worker, time.monotonic_ns())
        self._statuses[status.worker] = status
        self._outbox.put(status.worker, status)

    def publish_end(self, order: WorkerOrder, error: FleetError | None = None) -> None:
        """Publishes the end of a worker that never started."""
        self.publish(
            WorkerStatus(
                worker=order.worker,
                node=order.node,
                function=order.spec.name,
                version=order.version,
                state="gone" if error is None else "failed",
                error=error.info() if error is not None else None,
                changed_unix_ns=time.time_ns(),
                shell=order.shell,
            )
        )

    def republish_all(self) -> None:
        """Publishes all statuses again: Redis may have lost them."""
        self._outbox.put_all(self._statuses)

    def forget_unknown(self, written: Iterable[WorkerId]) -> None:
        """Deletes statuses that were forgotten here, and that a Redis which was killed has again."""
        for worker in written:
            if worker not in self._statuses:
                self._outbox.put(worker, None)

    def forget(self, worker: WorkerId) -> None:
        """Deletes the status of a worker."""
        self._statuses.pop(worker, None)
        self._seen_ns.pop(worker, None)
        self._outbox.put(worker, None)
