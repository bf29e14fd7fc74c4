"""Holdings: what is on its way to a node, for which others may wait."""

from __future__ import annotations

import msgspec
import pytest

from fleetstart.controller.peers.holdings import Checkpoint, Holding, chunks_coming, chunks_needed, holdings_of
from fleetstart.runtime.contract.ids import CheckpointId, NodeId, PipelineId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.node.peers import Pull
from fleetstart.runtime.contract.node.reports import NodeReport, SegmentReport
from fleetstart.runtime.contract.weights.stage import LayerLayout, Stage
from tests.controller.scheduler.test_autoscaler import spec

CHECKPOINT = CheckpointId("c" * 64)
LAYOUT = LayerLayout(0, [1, 1, 1, 1], [(0, 3), (2, 6), (6, 9), (8, 12)])
KNOWN = Checkpoint(size_bytes=12, chunks=12, layout=LAYOUT)
REPORT = NodeReport(node=NodeId("n"), epoch="e", address="n", memory_bytes=100, memory_used_bytes=0, cpus=2)


def order(index: int, *, grow: bool = False) -> WorkerOrder:
    stage = Stage(pipeline=PipelineId("p"), index=index, cuts=((0, 2), (2, 4)))
    return WorkerOrder(
        worker=WorkerId(f"w-{index}"), node=NodeId("n"), epoch="e", version=Version(1),
        spec=spec(weights=CHECKPOINT), ordered_unix_ns=5, stage=stage, grow=grow,
    )  # fmt: skip


def holding(one: WorkerOrder, *segments: SegmentReport) -> Holding:
    report = msgspec.structs.replace(REPORT, segments=list(segments))
    return holdings_of(report, [one], {}, [], {CHECKPOINT: KNOWN})[CHECKPOINT]


@pytest.mark.parametrize("grow", [False, True])
def test_others_wait_for_the_chunks_of_a_stage_and_never_for_its_growth(grow: bool) -> None:
    """A stage grows once its whole pipeline serves: another stage of it that waited for that would wait for itself."""
    assert holding(order(0, grow=grow)).coming == ((0, 6),)
    assert holding(order(1, grow=grow)).coming == ((6, 12),)
    part = SegmentReport(CHECKPOINT, "filling", 12, 4, [(0, 4)])
    assert holding(order(0, grow=grow), part).coming == ((4, 6),)
    own = SegmentReport(CHECKPOINT, "partial", 12, 6, [(0, 6)])
    assert holding(order(0, grow=grow), own).serves == ((0, 6),)


def test_a_stage_of_a_multicast_fetches_all_at_once() -> None:
    """The plan says who waits for whom."""
    one = msgspec.structs.replace(order(1, grow=True), pulls=(Pull(0, 0, 12),))
    assert chunks_coming(one, KNOWN) == ((0, 12),)


def test_a_stage_that_grows_needs_all_chunks() -> None:
    assert chunks_needed(order(1), KNOWN) == ((6, 12),)
    assert chunks_needed(order(1, grow=True), KNOWN) == ((0, 12),)
