"""Holdings: which node has which chunks of a checkpoint: derived from a node's report and its orders. Pure.

A node's report says what is in its memory and on its disk, chunk by chunk. What is on its way follows from its orders:
the chunks of the stage that a starting worker needs, or all of a copy. Nothing is kept beyond reports and orders, and a
node whose lease has lapsed holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from fleetstart.runtime.contract.node.orders import FINAL, WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.node.peers import CopyOrder
from fleetstart.runtime.contract.node.reports import NodeReport, SegmentReport
from fleetstart.runtime.contract.weights.stage import LayerLayout

from ..state.records import VersionRecord
from .chunk_ranges import Ranges, union, without


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A deployed checkpoint, as far as chunks are concerned."""

    size_bytes: int
    chunks: int = 0
    """Number of its chunks; 0 if it was deployed by a release that did not note it."""
    layout: LayerLayout | None = None

    @property
    def every(self) -> Ranges:
        return ((0, self.chunks),) if self.chunks else ()


def checkpoint_of(record: VersionRecord) -> Checkpoint:
    """The checkpoint of a version that has weights."""
    return Checkpoint(size_bytes=record.segment_bytes, chunks=_chunks(record), layout=record.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one node has of one checkpoint."""

    host: Ranges = ()
    """Chunks in its memory, which others may read."""
    coming: Ranges = ()
    """Chunks that its orders have it fetch, and that are not there yet."""
    disk: Ranges = ()
    complete: bool = False
    """True if all of the checkpoint is in its memory."""
    since_unix_ns: int = 0
    """Time of the first order for which it fetches; 0 if it fetches nothing. Of two nodes that fetch, the later one
    reads from the earlier one, so that none waits for one that waits for it."""

    @property
    def serves(self) -> Ranges:
        """The chunks that it can give others, now or once they have come."""
        return union(self.host, self.coming)


EMPTY = Holding()


@dataclass(slots=True)
class _Draft:
    needed: list[tuple[int, int]] = field(default_factory=list)
    since_unix_ns: int = 0

    def add(self, ranges: Ranges, since_unix_ns: int) -> None:
        self.needed.extend(ranges)
        self.since_unix_ns = min(since_unix_ns, self.since_unix_ns or since_unix_ns)


def holdings_of(
    report: NodeReport,
    orders: Iterable[WorkerOrder],
    statuses: Mapping[WorkerId, WorkerStatus],
    copies: Iterable[CopyOrder],
    checkpoints: Mapping[CheckpointId, Checkpoint],
) -> dict[CheckpointId, Holding]:
    """What the node of a living report holds of these checkpoints. Orders of another epoch count for nothing."""
    segments = {one.checkpoint: one for one in report.segments if one.state != "failed"}
    drafts: dict[CheckpointId, _Draft] = {}
    for order in orders:
        weights = order.spec.weights
        known = checkpoints.get(weights) if weights is not None else None
        if weights is None or known is None or order.epoch != report.epoch:
            continue
        if is_fetching(order, statuses.get(order.worker), segments.get(weights), known):
            since_unix_ns = order.decided_unix_ns or order.ordered_unix_ns
            drafts.setdefault(weights, _Draft()).add(chunks_coming(order, known), since_unix_ns)
    for copy in copies:
        known = checkpoints.get(copy.checkpoint)
        if known is not None and copy.epoch == report.epoch:
            drafts.setdefault(copy.checkpoint, _Draft()).add(known.every, copy.decided_unix_ns)
    found = {}
    for checkpoint in segments.keys() | drafts.keys() | report.disk.keys():
        if checkpoint in checkpoints:
            found[checkpoint] = _holding(
                segments.get(checkpoint), drafts.get(checkpoint), union(report.disk.get(checkpoint, ()))
            )
    return found


def is_fetching(
    order: WorkerOrder, status: WorkerStatus | None, segment: SegmentReport | None, checkpoint: Checkpoint
) -> bool:
    """True if chunks are on their way for a worker, or soon will be."""
    if order.wanted != "run" or (status is not None and status.state in FINAL):
        return False
    if segment is None or status is None or status.state == "starting":
        return segment is None or segment.state != "ready"
    if segment.state == "filling":
        return True
    return order.grow and not status.whole and segment.state != "ready"


def chunks_needed(order: WorkerOrder, checkpoint: Checkpoint) -> Ranges:
    """The chunks that a worker needs in the end: those of its stage, or all; empty if they are not known."""
    return checkpoint.every if order.grow else chunks_coming(order, checkpoint)


def chunks_coming(order: WorkerOrder, checkpoint: Checkpoint) -> Ranges:
    """The chunks that a worker fetches at once, for which others may wait; empty if they are not known.

    A stage that is to become whole fetches the rest once it serves, in the background. Another stage of its pipeline
    that waited for these would wait for itself. By a multicast it fetches all at once, in the order of the plan.
    """
    if order.pulls:
        return checkpoint.every
    layout = checkpoint.layout
    if order.stage is None or layout is None or not layout.layer_chunks:
        return checkpoint.every if order.stage is None else ()
    ends = layout.ends_chunks if order.stage.first == 0 else []
    return union(layout.layer_chunks[order.stage.first : order.stage.end], ends)


def _holding(segment: SegmentReport | None, draft: _Draft | None, disk: Ranges) -> Holding:
    host = union(segment.ranges) if segment is not None else ()
    complete = segment is not None and segment.state == "ready"
    coming = without(union(draft.needed), host) if draft is not None and not complete else ()
    fetches = draft is not None and not complete
    return Holding(
        host=host,
        coming=coming,
        disk=disk,
        complete=complete,
        since_unix_ns=draft.since_unix_ns if draft is not None and fetches else 0,
    )


def _chunks(record: VersionRecord) -> int:
    if record.chunks or record.layout is None:
        return record.chunks
    ends = [end for _, end in (*record.layout.layer_chunks, *record.layout.ends_chunks)]
    return max(ends, default=0)
