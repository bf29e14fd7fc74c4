"""On which node a worker shall run, or why on none.

A node that holds the checkpoint's segment comes first (nothing to fetch), then the one with the most free
memory. What was ordered but is not yet in the node's own report is counted as used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleetstart.runtime.contract.errors import ErrorInfo, Unavailable
from fleetstart.runtime.contract.function import MIB, FunctionSpec
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.messages import NodeReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    report: NodeReport
    pending_bytes: int
    """Memory of workers ordered there that the node has not acknowledged."""
    workers: int


def segment_rank(report: NodeReport, checkpoint: CheckpointId | None) -> int:
    """2 the segment is whole, 1 it is on its way, 0 it must be fetched (or nothing is needed)."""
    for segment in report.segments:
        if segment.checkpoint == checkpoint and segment.state != "failed":
            return 2 if segment.state == "ready" else 1
    return 0


def required_bytes(spec: FunctionSpec, segment_bytes: int, report: NodeReport) -> int:
    return spec.memory_bytes + (0 if segment_rank(report, spec.weights) else segment_bytes)


def place(spec: FunctionSpec, segment_bytes: int, candidates: Sequence[Candidate]) -> NodeReport | ErrorInfo:
    def free_bytes(candidate: Candidate) -> int:
        return candidate.report.memory_bytes - candidate.report.memory_used_bytes - candidate.pending_bytes

    fitting = [
        candidate
        for candidate in candidates
        if free_bytes(candidate) >= required_bytes(spec, segment_bytes, candidate.report)
    ]
    if fitting:
        best = max(fitting, key=lambda c: (segment_rank(c.report, spec.weights), free_bytes(c), -c.workers))
        return best.report
    if not candidates:
        return Unavailable(
            f"function {spec.name}: no node is alive",
            hint="`fs status` lists nodes; `fs up` starts one here",
            retry_after_s=2,
        ).info()
    roomiest = max(candidates, key=free_bytes)
    report = roomiest.report
    need_mib = required_bytes(spec, segment_bytes, report) // MIB
    free_mib = max(0, free_bytes(roomiest)) // MIB
    return Unavailable(
        f"function {spec.name}: a worker needs {need_mib} MiB, the roomiest node {report.node} "
        f"has {free_mib} of {report.memory_bytes // MIB} MiB free",
        hint="stop or shrink other functions, or lower `memory`",
        retry_after_s=5,
    ).info()


def never_fits(spec: FunctionSpec, segment_bytes: int, candidates: Sequence[Candidate]) -> bool:
    """Whether waiting is useless: there are nodes, and none would be large enough even when empty."""
    need = spec.memory_bytes + segment_bytes
    return bool(candidates) and all(candidate.report.memory_bytes < need for candidate in candidates)
