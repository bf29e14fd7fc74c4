"""Checkpoints of which functions ask to keep a copy in host memory, and what nodes have for them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fleetstart.runtime.contract.ids import CheckpointId, NodeId, WorkerId
from fleetstart.runtime.contract.node.orders import FINAL, WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.node.peers import CopyOrder
from fleetstart.runtime.contract.node.reports import NodeReport

from ..state.records import FunctionRecord, VersionKey, VersionRecord
from ..state.traffic import in_service
from .copies import Copy, CopyNode, KeptCheckpoint
from .holdings import Holding

PART_HELD = 0.5
"""Worth, for placement, of having a part in memory, or having it on its way."""
DISK_HELD = 0.25
"""Worth of having a part on disk, which is read sooner than a network, and later than memory."""
STALL_NS = 60_000_000_000
"""Time without a new chunk after which a copy is tried elsewhere: longer than a source that fails is tried."""
REFUSED_NS = 300_000_000_000
"""Time for which a node is not asked again for a copy that it did not fetch."""


def kept_by(
    function: FunctionRecord, versions: Mapping[VersionKey, VersionRecord]
) -> dict[CheckpointId, KeptCheckpoint]:
    """The checkpoints of a function's versions in service that ask for a copy."""
    found: dict[CheckpointId, KeptCheckpoint] = {}
    for number in in_service(function):
        record = versions.get(VersionKey(function.name, number))
        if record is not None and record.spec.keep == "host" and record.spec.weights is not None:
            one = KeptCheckpoint(size_bytes=record.segment_bytes, regions=frozenset({frozenset(record.spec.region)}))
            found[record.spec.weights] = _both(found.get(record.spec.weights), one)
    return found


def all_kept(by_function: Iterable[Mapping[CheckpointId, KeptCheckpoint]]) -> dict[CheckpointId, KeptCheckpoint]:
    """The checkpoints that any function keeps: each once for the same regions, however many ask for it."""
    found: dict[CheckpointId, KeptCheckpoint] = {}
    for kept in by_function:
        for checkpoint, one in kept.items():
            found[checkpoint] = _both(found.get(checkpoint), one)
    return found


def _both(known: KeptCheckpoint | None, other: KeptCheckpoint) -> KeptCheckpoint:
    if known is None:
        return other
    size_bytes = max(known.size_bytes, other.size_bytes)
    return KeptCheckpoint(size_bytes=size_bytes, regions=known.regions | other.regions)


def copy_node(
    report: NodeReport,
    orders: Iterable[WorkerOrder],
    statuses: Mapping[WorkerId, WorkerStatus],
    held: Callable[[CheckpointId], Holding],
    kept: Iterable[CheckpointId],
    refuses: frozenset[CheckpointId],
) -> CopyNode:
    """A living node, as a place for copies. `held`: what it has of a checkpoint. Segments that no worker uses give way
    to them."""
    sizes = {one.checkpoint: one.size_bytes for one in report.segments if one.state != "failed"}
    present_bytes = sum(one.ready_bytes for one in report.segments)
    used: set[CheckpointId] = set()
    promised_bytes = 0
    for order in orders:
        status = statuses.get(order.worker)
        if status is not None and status.state in FINAL:
            continue
        used.update(order.spec.checkpoints)
        promised_bytes += order.spec.memory_bytes if status is None else 0
    used_bytes = sum(sizes.get(checkpoint, 0) for checkpoint in used)
    workers_bytes = max(0, report.memory_used_bytes - present_bytes)
    return CopyNode(
        node=report.node,
        region=report.region,
        room_bytes=report.memory_bytes - workers_bytes - used_bytes - promised_bytes,
        used=frozenset(used),
        held={one: share for one in kept if (share := _share(held(one)))},
        refuses=refuses,
    )


def _share(holding: Holding) -> float:
    if holding.complete:
        return 1.0
    if holding.host or holding.coming:
        return PART_HELD
    return DISK_HELD if holding.disk else 0.0


@dataclass(slots=True)
class _Seen:
    ready_bytes: int
    since_ns: int


class CopyProgress:
    """What comes of ordered copies: which make no progress, and which nodes are not to be asked again for a while."""

    def __init__(self) -> None:
        self._seen: dict[tuple[NodeId, CheckpointId, int], _Seen] = {}
        self._refused: dict[tuple[NodeId, CheckpointId], int] = {}

    def observe(self, copies: Iterable[CopyOrder], reports: Mapping[NodeId, NodeReport], now_ns: int) -> None:
        seen: dict[tuple[NodeId, CheckpointId, int], _Seen] = {}
        for copy in copies:
            report = reports.get(copy.node)
            segment = (
                next((one for one in report.segments if one.checkpoint == copy.checkpoint), None) if report else None
            )
            key = (copy.node, copy.checkpoint, copy.decided_unix_ns)
            ready_bytes, known = segment.ready_bytes if segment is not None else 0, self._seen.get(key)
            if known is None or known.ready_bytes != ready_bytes or (segment is not None and segment.state == "ready"):
                known = _Seen(ready_bytes, now_ns)
            seen[key] = known
            if now_ns - known.since_ns > STALL_NS:
                self._refused[copy.node, copy.checkpoint] = now_ns
        self._seen = seen
        self._refused = {key: at_ns for key, at_ns in self._refused.items() if now_ns - at_ns < REFUSED_NS}

    def refused(self, node: NodeId) -> frozenset[CheckpointId]:
        return frozenset(checkpoint for one, checkpoint in self._refused if one == node)


def copy_of(order: CopyOrder, holding: Holding, *, region: str | None, living: bool, leaves: bool) -> Copy:
    """An ordered copy as the decision sees it. `region`: that of its node, if it is known."""
    return Copy(
        node=order.node,
        checkpoint=order.checkpoint,
        ordered_unix_ns=order.decided_unix_ns,
        region=region,
        complete=living and holding.complete,
        living=living,
        stays=not leaves,
    )
