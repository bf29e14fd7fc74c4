"""Where a worker goes, and what is said when it can go nowhere."""

from __future__ import annotations

from fleetstart.controller.placement import Candidate, never_fits, place
from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.function import MIB
from fleetstart.runtime.contract.ids import CheckpointId, NodeId
from fleetstart.runtime.contract.messages import NodeReport, SegmentReport
from tests.controller.test_autoscale import spec

WEIGHTS = CheckpointId("c" * 64)


def node(name: str, free_mib: int, *, segment: str = "", pending_mib: int = 0) -> Candidate:
    segments = [SegmentReport(WEIGHTS, segment, 100, 50)] if segment else []  # type: ignore[arg-type]
    report = NodeReport(
        node=NodeId(name), epoch="e", address="", memory_bytes=8192 * MIB, cpus=1,
        memory_used_bytes=(8192 - free_mib) * MIB, segments=segments,
    )  # fmt: skip
    return Candidate(report=report, pending_bytes=pending_mib * MIB, workers=0)


def chosen(*nodes: Candidate, segment_mib: int = 1000) -> str:
    placed = place(spec(weights=WEIGHTS), segment_mib * MIB, nodes)
    return placed.message if isinstance(placed, ErrorInfo) else placed.node


def test_the_segment_comes_before_free_memory() -> None:
    assert chosen(node("a", 4000), node("b", 2000, segment="ready")) == "b"
    assert chosen(node("a", 4000, segment="filling"), node("b", 2000, segment="ready")) == "b"
    assert chosen(node("a", 4000), node("b", 2000, segment="failed")) == "a"
    assert chosen(node("a", 4000), node("b", 5000)) == "b"


def test_a_segment_that_is_there_needs_no_room() -> None:
    assert chosen(node("a", 1400), node("b", 600, segment="ready")) == "b"


def test_what_was_ordered_counts() -> None:
    assert chosen(node("a", 4000, pending_mib=3000), node("b", 2000)) == "b"


def test_the_reason_has_figures() -> None:
    said = chosen(node("a", 1000), node("b", 1400))
    assert "1512 MiB" in said
    assert "node b has 1400 of 8192 MiB" in said
    assert "no node is alive" in chosen()


def test_some_functions_never_fit() -> None:
    assert never_fits(spec(), 8000 * MIB, [node("a", 10)])
    assert not never_fits(spec(), 7000 * MIB, [node("a", 10)])
    assert not never_fits(spec(), 9000 * MIB, [])
