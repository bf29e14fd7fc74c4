"""What a call's timeline says of the start that it waited for."""

from __future__ import annotations

import pytest

from fleetstart.controller.gateway.dispatch.call_record import add_start_phases
from fleetstart.runtime.contract.ids import NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.timeline import Timeline
from tests.controller.gateway.dispatch.test_backend import call, status
from tests.controller.scheduler.test_autoscaler import spec

MS = 1_000_000


@pytest.mark.parametrize(("decided_ms", "placed_ms"), [(3, [3.0]), (0, [250.0]), (-40, [])])
def test_placing_ends_when_the_start_was_decided_whenever_its_order_was_written_last(
    decided_ms: int, placed_ms: list[float]
) -> None:
    """Of a scheduler that does not say when, the last order counts. A start from before the call was not for it."""
    unix_ns = 1_000_000 * MS
    accepted, timeline = call("a", accepted_unix_ns=unix_ns), Timeline()
    order = WorkerOrder(
        worker=WorkerId("w"), node=NodeId("n"), epoch="e", version=Version(1), spec=spec(),
        ordered_unix_ns=unix_ns + 250 * MS, decided_unix_ns=unix_ns + decided_ms * MS if decided_ms else 0,
    )  # fmt: skip
    add_start_phases(timeline, accepted, status("w"), order, 0)
    assert [phase.duration_ms for phase in timeline.phases if phase.name == "place"] == placed_ms
