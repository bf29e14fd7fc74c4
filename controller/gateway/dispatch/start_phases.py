"""Phases of a worker's start on the timeline of a call that waited for it."""

from __future__ import annotations

from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.timeline import Timeline

from .version_backend import Call


def add_start_phases(
    timeline: Timeline, call: Call, status: WorkerStatus, order: WorkerOrder | None, since_ns: int
) -> None:
    """Adds the phases of the start that the call has waited for since then to the timeline."""
    decided_unix_ns = order.decided_unix_ns or order.ordered_unix_ns if order is not None else 0
    placed_ns = call.accepted_ns + decided_unix_ns - call.accepted_unix_ns
    if placed_ns > since_ns:
        timeline.add("place", since_ns, placed_ns)
    joined = Timeline(origin_unix_ns=timeline.origin_unix_ns)
    joined.join(status.timeline)
    for phase in joined.phases:
        if phase.ended_ns > since_ns:
            timeline.add(phase.name, max(phase.started_ns, since_ns), phase.ended_ns)
