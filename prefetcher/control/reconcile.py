"""What to do so that the workers that run are the workers that are wanted: a pure function.

Orders are facts of another process and may be stale in two ways. An order of another epoch was meant for
this node's previous life: it is refused, never run. And a full read of the orders may be older than what a
message has told us since: absence from a read counts only for what was known before the read began.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.orders import FINAL, WorkerOrder, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownWorker:
    """What the node has for one order, running or only remembered."""

    state: WorkerState
    seen_ns: int
    """When its order was first seen."""


@dataclass(frozen=True, slots=True)
class StartWorker:
    order: WorkerOrder


@dataclass(frozen=True, slots=True)
class RejectOrder:
    """Answered with a `gone` status, and nothing else."""

    order: WorkerOrder
    reason: str


@dataclass(frozen=True, slots=True)
class UpdateWorker:
    """The worker runs; what its order says of its pipeline may be new."""

    order: WorkerOrder


@dataclass(frozen=True, slots=True)
class DrainWorker:
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Its order is gone: nobody wants it, nobody waits for it."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class ForgetWorker:
    """Its end has been seen by who ordered it: the status may go."""

    worker: WorkerId


Action = StartWorker | RejectOrder | UpdateWorker | DrainWorker | KillWorker | ForgetWorker


def act_on_order(order: WorkerOrder, known: Mapping[WorkerId, KnownWorker], epoch: str) -> Action | None:
    """One order, from a message or out of a full read."""
    worker_known = known.get(order.worker)
    if worker_known is None:
        if order.epoch != epoch:
            return RejectOrder(order, "ordered from an earlier start of this node")
        if order.wanted == "drain":
            return RejectOrder(order, "taken back before it was started")
        return StartWorker(order)
    if order.wanted == "drain" and worker_known.state in ("starting", "ready"):
        return DrainWorker(order.worker)
    if order.wanted == "run" and order.stage is not None and worker_known.state not in FINAL:
        return UpdateWorker(order)
    return None


def reconcile(
    orders: Mapping[WorkerId, WorkerOrder], known: Mapping[WorkerId, KnownWorker], epoch: str, read_began_ns: int
) -> list[Action]:
    """Actions after a full read of the orders that began at `read_began_ns`. Once done, none are left to do."""
    actions = [action for order in orders.values() if (action := act_on_order(order, known, epoch)) is not None]
    for worker, worker_known in known.items():
        if worker in orders or worker_known.seen_ns >= read_began_ns:
            continue
        actions.append(ForgetWorker(worker) if worker_known.state in FINAL else KillWorker(worker))
    return actions
