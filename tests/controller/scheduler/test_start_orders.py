"""Orders that are made of plans: parts of pipelines, of a group and of a multicast."""

from __future__ import annotations

from fleetstart.controller.planner.plan import Plan, StagePlan
from fleetstart.controller.scheduler.start_orders import NEW_IDS, orders_of
from fleetstart.controller.state.records import VersionRecord
from fleetstart.runtime.contract.ids import NodeId, Version
from fleetstart.runtime.contract.node.peers import Pull
from tests.controller.scheduler.test_autoscaler import spec

RECORD = VersionRecord(version=Version(1), digest="", spec=spec(), segment_bytes=0, created_unix_ms=0)


def stage(name: str, first: int, end: int) -> StagePlan:
    return StagePlan(
        node=NodeId(name), epoch="e", first=first, end=end, full=True, memory_bytes=1, reserved_bytes=1,
        missing_bytes=1, store_bytes=0, fetch_s=1.0, pulls=[Pull(0, 0, 9)],
    )  # fmt: skip


def test_nodes_of_a_multicast_are_in_its_pipelines_and_all_become_whole() -> None:
    stages = [stage("a", 3, 8), stage("b", 0, 4), stage("c", 0, 8), stage("d", 0, 3), stage("e", 4, 8)]
    plan = Plan(stages=stages, together=False, multicast="chain", pipelines=[[3, 0], [1, 4]], reason="")
    orders = orders_of(plan, RECORD, NEW_IDS, grow=5, now_unix_ns=0)
    a, b, c, d, e = orders
    assert c.stage is None
    assert not c.grow
    assert d.stage is not None
    assert a.stage is not None
    assert (d.stage.pipeline, d.secret) == (a.stage.pipeline, a.secret)
    assert (d.stage.index, a.stage.index) == (0, 1)
    assert d.stage.cuts == a.stage.cuts == ((0, 3), (3, 8))
    assert b.stage is not None
    assert e.stage is not None
    assert b.stage.pipeline == e.stage.pipeline != d.stage.pipeline
    assert b.secret == e.secret != d.secret
    assert all(one.grow and one.peers == ("", "") for one in (a, b, d, e))
    assert all(one.pulls == (Pull(0, 0, 9),) for one in orders)


def test_a_group_is_one_pipeline_of_which_some_become_whole_and_a_single_worker_is_none() -> None:
    group = orders_of(
        Plan(stages=[stage("a", 0, 4), stage("b", 4, 8)], reason=""), RECORD, NEW_IDS, grow=1, now_unix_ns=0
    )
    assert [one.grow for one in group] == [True, False]
    assert len({one.stage.pipeline for one in group if one.stage is not None}) == 1
    (alone,) = orders_of(Plan(stages=[stage("a", 0, 8)], reason=""), RECORD, NEW_IDS, grow=1, now_unix_ns=0)
    assert (alone.stage, alone.grow, alone.secret, alone.peers) == (None, False, "", ())
