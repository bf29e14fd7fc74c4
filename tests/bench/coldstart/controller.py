"""Controller with one decision changed, for the sides that ours is compared with. Not for users, who have no use
for a pipeline that stays one.

    python -m tests.bench.coldstart.controller stay     pipelines are ordered without ever growing
    python -m tests.bench.coldstart.controller single   starts are planned as one worker each
    python -m tests.bench.coldstart.controller multicast   a burst's workers start by multicast and serve once whole
    python -m tests.bench.coldstart.controller store    starts are one worker each, and read from no peer
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from fleetstart.controller import __main__ as controller
from fleetstart.controller.peers.pool import ParameterPool
from fleetstart.controller.planner import Cluster, selection
from fleetstart.controller.planner.multicast import starts
from fleetstart.controller.scheduler import reconcile, start_orders

CHANGES = ("stay", "single", "multicast", "store")


def _stay() -> None:
    ordered = start_orders.orders_of

    def without_growing(*arguments: Any, **named: Any) -> Any:
        return [msgspec.structs.replace(order, grow=False) for order in ordered(*arguments, **named)]

    patched: Any = reconcile
    patched.orders_of = without_growing


def _single() -> None:
    planning: Any = selection
    planning.SIZE_USUAL = planning.SIZE_MOST = 1
    reconciling: Any = reconcile
    reconciling.SIZE_USUAL = 1


def _multicast() -> None:
    planning: Any = starts
    planning._why_not = lambda *_: ""
    planning._pipelines = lambda *_: []


def _store() -> None:
    _single()
    cluster: Any = Cluster
    pool: Any = ParameterPool
    cluster.peers = lambda *_: []
    pool.with_sources = lambda _, orders, *__: list(orders)
    pool._changed_fetches = lambda *_: ()


if __name__ == "__main__":
    {"stay": _stay, "single": _single, "multicast": _multicast, "store": _store}[sys.argv[1]]()
    sys.exit(controller.main())
