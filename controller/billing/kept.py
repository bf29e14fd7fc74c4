"""Which workers are kept because their function asked for `min` of them: their idle time is billed, no other's is."""

from __future__ import annotations

from collections.abc import Set

from fleetstart.runtime.contract.ids import FunctionName, WorkerId

from ..state.records import VersionKey, is_helper
from ..state.view import View


def kept_workers(view: View, spent: Set[FunctionName]) -> frozenset[WorkerId]:
    """Of each live version the `min` workers that are ready for longest; none of a function whose budget is spent."""
    kept: set[WorkerId] = set()
    for name, record in view.functions.items():
        version = view.versions.get(VersionKey(name, record.live))
        if version is None or not version.spec.scale.min or name in spent:
            continue
        ready = [
            (status.changed_unix_ns, order.worker)
            for order in view.orders.values()
            if order.spec.name == name and order.version == record.live and order.wanted == "run"
            if (status := view.statuses.get(order.worker)) is not None
            if status.state == "ready" and not is_helper(order, status)
        ]
        kept.update(worker for _, worker in sorted(ready)[: version.spec.scale.min])
    return frozenset(kept)
