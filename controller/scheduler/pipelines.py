"""Pipelines: updates the orders of their stages with each other's addresses, consolidates them, drains unneeded ones.

A pipeline is the set of orders that name it. Its first stage represents it: it is counted, called, and made whole. The
others are helpers, and are drained once the first is whole, or at once if it is gone: part of a pipeline can serve no
calls. Where more workers are needed, helpers become whole workers instead (HydraServe section 6.1). Pure: orders and
statuses in, changed orders out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set

import msgspec

from fleetstart.runtime.contract.ids import PipelineId, WorkerId
from fleetstart.runtime.contract.node.orders import FINAL, NO_PEER, WorkerOrder, WorkerStatus

from ..state.records import is_helper


def update_pipelines(
    orders: Iterable[WorkerOrder],
    statuses: Mapping[WorkerId, WorkerStatus],
    lost: frozenset[WorkerId],
    now_unix_ns: int,
    overdue: frozenset[WorkerId] = frozenset(),
) -> list[WorkerOrder]:
    """The orders that change. `lost`: workers whose node is gone; `overdue`: workers whose last order is older than a
    start may take."""
    pipelines: dict[PipelineId, list[WorkerOrder]] = defaultdict(list)
    for order in orders:
        if order.stage is not None:
            pipelines[order.stage.pipeline].append(order)
    changed: list[WorkerOrder] = []
    for stages in pipelines.values():
        changed += _tend_one(stages, statuses, lost, now_unix_ns, overdue)
    return changed


def _tend_one(
    stages: list[WorkerOrder],
    statuses: Mapping[WorkerId, WorkerStatus],
    lost: frozenset[WorkerId],
    now_unix_ns: int,
    overdue: frozenset[WorkerId],
) -> list[WorkerOrder]:
    def over(order: WorkerOrder) -> bool:
        status = statuses.get(order.worker)
        return order.worker in lost or (status is not None and status.state in FINAL)

    first = next((order for order in stages if order.stage is not None and order.stage.index == 0), None)
    first_status = statuses.get(first.worker) if first is not None else None
    # A draining first stage still has calls, which need its pipeline.
    needed = first is not None and not over(first) and not (first_status is not None and first_status.whole)
    links = _links([order for order in stages if order.worker not in lost], statuses)
    here = {order.stage.index for order in stages if order.stage is not None and not over(order)}
    changed = []
    for order in stages:
        if over(order) or order.wanted == "drain":
            continue
        helps = is_helper(order, statuses.get(order.worker))
        still_grows = order.grow and order.worker not in overdue  # a helper that becomes a whole worker
        if helps and not needed and not still_grows:
            changed.append(order.changed(now_unix_ns, wanted="drain"))
        elif needed:
            updated = msgspec.structs.replace(
                order, peers=_merged(order.peers, links, here), relayed=_relayed(order, stages, statuses)
            )
            if updated != order:
                changed.append(updated.changed(now_unix_ns))
    return changed


def consolidation_orders(
    orders: Iterable[WorkerOrder],
    statuses: Mapping[WorkerId, WorkerStatus],
    lost: frozenset[WorkerId],
    count: int,
    *,
    memory_bytes: int,
    now_unix_ns: int,
) -> list[WorkerOrder]:
    """Orders by which up to `count` helpers with a whole worker's memory become whole workers."""
    found = []
    for order in sorted(orders, key=lambda order: order.stage.index if order.stage is not None else 0):
        status = statuses.get(order.worker)
        over = order.worker in lost or (status is not None and status.state in FINAL)
        may = order.wanted == "run" and not order.grow and order.spec.memory_bytes >= memory_bytes
        if is_helper(order, status) and may and not over:
            found.append(order.changed(now_unix_ns, grow=True))
    return found[:count]


def _links(stages: list[WorkerOrder], statuses: Mapping[WorkerId, WorkerStatus]) -> dict[int, str]:
    """The known addresses of stages."""
    found: dict[int, str] = {}
    for order in stages:
        status = statuses.get(order.worker)
        if order.stage is not None and status is not None and status.link:
            found[order.stage.index] = status.link
    return found


def _relayed(
    order: WorkerOrder, stages: list[WorkerOrder], statuses: Mapping[WorkerId, WorkerStatus]
) -> tuple[int, ...]:
    """Stages that reach this one through the object store only. Entries are never removed."""
    found = set(order.relayed)
    for other in stages:
        status = statuses.get(other.worker)
        if other.stage is not None and order.stage is not None and status is not None:
            found |= {other.stage.index} if order.stage.index in status.relayed else set()
    return tuple(sorted(found))


def _merged(peers: tuple[str, ...], links: Mapping[int, str], here: Set[int]) -> tuple[str, ...]:
    """Addresses of the peers. A known one stays: the nodes have connected to it, and do not again. A stage that ended
    before it reported one is marked as absent."""
    return tuple(known or links.get(index, "" if index in here else NO_PEER) for index, known in enumerate(peers))
