"""Reports of gateways: a heartbeat that says nothing new wakes nobody."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from fleetstart.controller.state.sync import StateSync
from fleetstart.controller.state.view import GATEWAY_LEASE_MS, View
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.node.reports import FunctionLoad, GatewayReport
from tests.controller.scheduler.cluster import ManualClock


def test_a_heartbeat_keeps_its_gateway_and_wakes_nobody() -> None:
    clock, view, changes = ManualClock(), View(), list[int]()
    state = StateSync(cast(Any, None), view, monotonic_ns=clock.monotonic_ns)
    view.on_change(lambda: changes.append(1))

    def heard(loads: dict[str, FunctionLoad]) -> None:
        state._event(keys.EVENTS_GATEWAYS, msgspec.json.encode(GatewayReport(gateway="g", loads=loads)))

    heard({})
    assert len(changes) == 1, "a new gateway"
    for _ in range(3):
        clock.advance(0.9 * GATEWAY_LEASE_MS / 1000)
        heard({})
        view.forget_gateways(clock.monotonic_ns())
    assert len(changes) == 1
    assert "g" in view.gateways
    heard({"f@1": FunctionLoad(1, 0)})
    heard({"f@1": FunctionLoad(1, 0)})
    heard({})
    assert len(changes) == 3
