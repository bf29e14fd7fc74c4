"""Controller with one decision changed, for the sides that ours is compared with. Not for users, who have no use
for a pipeline that stays one.

    python -m tests.bench.coldstart.controller stay     pipelines are ordered without ever growing
    python -m tests.bench.coldstart.controller single   starts are planned as one worker each
    python -m tests.bench.coldstart.controller multicast   a burst's workers start by multicast and serve once whole
    python -m tests.bench.coldstart.controller store    starts are one worker each, and read from no peer
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec

from fleetstart.controller import __main__ as controller
from fleetstart.controller.peers.pool import ParameterPool
from fleetstart.controller.planner import selection
from fleetstart.controller.planner.cluster import Cluster
from fleetstart.controller.planner.multicast import starts
from fleetstart.controller.scheduler import reconcile, start_orders

Patch = tuple[object, str, Any]
"""Module or class, the name in it, and what takes its place."""


def _stay() -> list[Patch]:
    ordered = start_orders.orders_of

    def without_growing(*arguments: Any, **named: Any) -> Any:
        return [msgspec.structs.replace(order, grow=False) for order in ordered(*arguments, **named)]

    return [(reconcile, "orders_of", without_growing)]


def _single() -> list[Patch]:
    return [(selection, "SIZE_USUAL", 1), (selection, "SIZE_MOST", 1), (reconcile, "SIZE_USUAL", 1)]


def _multicast() -> list[Patch]:
    return [(starts, "_why_not", lambda *_: ""), (starts, "_pipelines", lambda *_: [])]


def _store() -> list[Patch]:
    return [
        *_single(),
        (Cluster, "peers", lambda *_: []),
        (ParameterPool, "with_sources", lambda _, orders, *__: list(orders)),
        (ParameterPool, "_changed_fetches", lambda *_: ()),
    ]


CHANGES: dict[str, Callable[[], list[Patch]]] = {
    "stay": _stay,
    "single": _single,
    "multicast": _multicast,
    "store": _store,
}


if __name__ == "__main__":
    for owner, name, value in CHANGES[sys.argv[1]]():
        getattr(owner, name)  # one that moved would leave the decision as it was
        setattr(owner, name, value)
    sys.exit(controller.main())
