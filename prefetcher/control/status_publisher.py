"""What the node says of its workers, each from its order until who ordered it has seen its end."""

from __future__ import annotations

import time

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus

from .outbox import Outbox
from .reconcile import KnownWorker


class StatusPublisher:
    """Their statuses, which the outbox writes."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._statuses: dict[WorkerId, WorkerStatus] = {}
        self._seen_ns: dict[WorkerId, int] = {}

    def known_workers(self) -> dict[WorkerId, KnownWorker]:
        return {
            worker: KnownWorker(state=status.state, seen_ns=self._seen_ns[worker])
            for worker, status in self._statuses.items()
        }

    def publish(self, status: WorkerStatus) -> None:
        self._seen_ns.setdefault(status.worker, time.monotonic_ns())
        self._statuses[status.worker] = status
        self._outbox.put(status.worker, status)

    def publish_end(self, order: WorkerOrder, error: FleetError | None = None) -> None:
        """Of a worker that never began."""
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
        """All of them: Redis may have lost what it had."""
        self._outbox.put_all(self._statuses)

    def forget(self, worker: WorkerId) -> None:
        self._statuses.pop(worker, None)
        self._seen_ns.pop(worker, None)
        self._outbox.put(worker, None)
