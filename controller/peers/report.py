"""Report of copies in host memory, to people and to Prometheus: from the view of any controller. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fleetstart.runtime.contract.ids import CheckpointId, NodeId

from ..state.view import View
from .copies import is_in
from .kept import all_kept, kept_by

CopyState = Literal["ready", "fetching"]
KeptState = Literal["ready", "fetching", "missing"]
_LEAST_LAST: tuple[KeptState, ...] = ("ready", "fetching", "missing")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedCopy:
    """An ordered copy on a living node."""

    node: NodeId
    checkpoint: CheckpointId
    state: CopyState
    ready_bytes: int
    size_bytes: int
    """Size of the checkpoint; 0 if its node has not begun."""


def reported_copies(view: View, now_ns: int) -> list[ReportedCopy]:
    """The ordered copies, by node and checkpoint."""
    found = []
    for (node, checkpoint), order in sorted(view.copies.items()):
        seen = view.nodes.get(node)
        if seen is None or seen.lost(now_ns) or seen.report.epoch != order.epoch:
            continue
        segment = next((one for one in seen.report.segments if one.checkpoint == checkpoint), None)
        found.append(
            ReportedCopy(
                node=node,
                checkpoint=checkpoint,
                state="ready" if segment is not None and segment.state == "ready" else "fetching",
                ready_bytes=segment.ready_bytes if segment is not None else 0,
                size_bytes=segment.size_bytes if segment is not None else 0,
            )
        )
    return found


def kept_states(view: View, now_ns: int) -> Mapping[CheckpointId, KeptState]:
    """State of each checkpoint of which a function asks for a copy: there, being fetched, or nowhere. One that is to
    be in several regions has the state of that region where least of it is."""
    copies: dict[CheckpointId, list[ReportedCopy]] = defaultdict(list)
    for copy in reported_copies(view, now_ns):
        copies[copy.checkpoint].append(copy)
    kept = all_kept(kept_by(function, view.versions) for function in view.functions.values())
    states: dict[CheckpointId, KeptState] = {}
    for checkpoint, asked in sorted(kept.items()):
        found: list[KeptState] = []
        for regions in asked.regions:
            there = [one.state for one in copies[checkpoint] if is_in(view.nodes[one.node].report.region, regions)]
            found.append("ready" if "ready" in there else "fetching" if there else "missing")
        states[checkpoint] = max(found, key=_LEAST_LAST.index)
    return states


def nodes_with(view: View, now_ns: int) -> Mapping[CheckpointId, list[NodeId]]:
    """The living nodes that have all of a checkpoint in memory."""
    found: dict[CheckpointId, list[NodeId]] = defaultdict(list)
    for node, seen in sorted(view.nodes.items()):
        if not seen.lost(now_ns):
            for segment in seen.report.segments:
                if segment.state == "ready":
                    found[segment.checkpoint].append(node)
    return found
