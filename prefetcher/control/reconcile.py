"""Reconciliation: the actions that turn the running workers into the ordered ones. A pure function.

Orders are facts of another process and may be stale in two ways. An order of another epoch was meant for an earlier
start of this node: it is rejected, never run. So is one whose worker has ended here, which a Redis may have again that
lost its last writes: a worker lives once, as its rows in the ledger are named after it. And a full read of the orders
may be older than a message received since: absence from a read counts only for workers known before the read began.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.orders import FINAL, WorkerOrder, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownWorker:
    """A worker that the node has for an order, running or only remembered."""

    state: WorkerState
    seen_ns: int
    """When its order was first seen."""


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker for the order."""

    order: WorkerOrder


@dataclass(frozen=True, slots=True)
class RejectOrder:
    """Answer the order with a `gone` status, and do nothing else."""

    order: WorkerOrder
    reason: str


@dataclass(frozen=True, slots=True)
class UpdateWorker:
    """Pass the order on to its running worker: its pipeline may have changed."""

    order: WorkerOrder


@dataclass(frozen=True, slots=True)
class StandByWorker:
    """Let the worker finish its calls, then give its weights back."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WakeWorker:
    """Let the worker take its weights again."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class DrainWorker:
    """Let the worker finish its calls, then end it."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Kill the worker: its order is gone, so no caller waits for it."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class ForgetWorker:
    """Delete the status of an ended worker: the controller has seen it."""

    worker: WorkerId


Action = StartWorker | RejectOrder | UpdateWorker | StandByWorker | WakeWorker | DrainWorker | KillWorker | ForgetWorker


def act_on_order(
    order: WorkerOrder, known: Mapping[WorkerId, KnownWorker], ended: Container[WorkerId], epoch: str
) -> Action | None:
    """The action for one order, from a message or a full read. `ended`: workers that have lived here."""
    worker_known = known.get(order.worker)
    if worker_known is None:
        if order.epoch != epoch:
            return RejectOrder(order, "ordered from an earlier start of this node")
        if order.wanted != "run":
            return RejectOrder(order, "withdrawn before it was started")
        if order.worker in ended:
            return RejectOrder(order, "its worker has ended: Redis has an order again that was deleted")
        return StartWorker(order)
    if order.wanted == "drain" and worker_known.state in ("starting", "ready", "standby"):
        return DrainWorker(order.worker)
    if order.wanted == "standby" and worker_known.state == "ready":
        return StandByWorker(order.worker)
    if order.wanted == "run" and worker_known.state == "standby":
        return WakeWorker(order.worker)
    if order.wanted == "run" and order.stage is not None and worker_known.state not in FINAL:
        return UpdateWorker(order)
    return None


def reconcile(
    orders: Mapping[WorkerId, WorkerOrder],
    known: Mapping[WorkerId, KnownWorker],
    ended: Container[WorkerId],
    epoch: str,
    read_began_ns: int,
) -> list[Action]:
    """The actions after a full read of the orders that began at `read_began_ns`. Idempotent: once they are done,
    none are left."""
    actions = [action for order in orders.values() if (action := act_on_order(order, known, ended, epoch)) is not None]
    for worker, worker_known in known.items():
        if worker in orders or worker_known.seen_ns >= read_began_ns:
            continue
        actions.append(ForgetWorker(worker) if worker_known.state in FINAL else KillWorker(worker))
    return actions
