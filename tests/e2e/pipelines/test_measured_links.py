"""Measurements that a node of a slow network takes when it comes up, before anything was started on it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.node.reports import NodeReport
from tests.e2e.pipelines.fleet import LINK_SHARE, SETTLED_S, Fleet
from tests.servers import wait_until

pytestmark = pytest.mark.bed


def test_a_new_node_knows_the_rate_of_its_link_before_its_first_start(fleet: Fleet) -> None:
    """Otherwise its first start would be predicted with a link of a gigabit."""
    node = fleet.bed.nodes[0]
    node.stop()
    node.start()
    fleet.bed.wait_ready(fleet.hosts)

    def measured() -> float:
        with fleet.bed.redis() as client:
            raw: Any = client.get(keys.node(node.id))
        return msgspec.json.decode(raw, type=NodeReport).measured.get("store", 0.0) if raw else 0.0

    link = fleet.bed.mbit * 1e6 / 8 * LINK_SHARE
    found = wait_until(measured, SETTLED_S, what="a measurement of the link")
    assert link / 2 < found < link * 2, f"{found:,.0f} of {link:,.0f} bytes a second"
