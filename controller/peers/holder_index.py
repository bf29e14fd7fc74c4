"""Index of who holds which chunks and who fetches, kept up to date in place: a changed node is derived anew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, NodeId
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.node.peers import CopyOrder, Peer
from fleetstart.runtime.contract.node.reports import NodeReport

from ..state.records import VersionKey
from ..state.view import View
from .chunk_ranges import Ranges, without
from .copies import KeptCheckpoint
from .holdings import EMPTY, Checkpoint, Holding, checkpoint_of, chunks_needed, holdings_of, is_fetching
from .kept import kept_by
from .sources import PeerNode, peer_node


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchUnderWay:
    """A fetch of a worker, or of a copy."""

    order: WorkerOrder | CopyOrder
    checkpoint: CheckpointId
    needs: Ranges
    since_unix_ns: int

    @property
    def peers(self) -> tuple[Peer, ...]:
        return self.order.sources if isinstance(self.order, WorkerOrder) else self.order.peers


class HolderIndex:
    """Holders and fetches of the view's nodes."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._changes = view.follow()
        self._changes.nodes.update(view.nodes)
        self._changes.versions.update(view.versions)
        self._changes.functions.update(view.functions)
        self.checkpoints: dict[CheckpointId, Checkpoint] = {}
        """Those of all versions that were read."""
        self.kept_by: dict[FunctionName, dict[CheckpointId, KeptCheckpoint]] = {}
        """Checkpoints of which functions ask for a copy."""
        self.peers: dict[NodeId, PeerNode] = {}
        """The living nodes that serve others, but for those that drain."""
        self._holdings: dict[CheckpointId, dict[NodeId, Holding]] = defaultdict(dict)
        self._of_node: dict[NodeId, frozenset[CheckpointId]] = {}
        self._fetches: dict[NodeId, list[FetchUnderWay]] = {}
        self._living: set[NodeId] = set()

    def refresh(self, *, look: bool = False) -> bool:
        """Brings all up to date with the view; whether anything may be different. `look`: at each node's lease, too,
        which may be good again without a change being told."""
        functions, versions, stale = (
            self._changes.take_functions(),
            self._changes.take_versions(),
            self._changes.take_nodes(),
        )
        stale |= self._with_new_checkpoints(versions)
        if look:
            stale |= {node for node in self._view.nodes if (self.living(node) is not None) != (node in self._living)}
        for name in functions:
            function = self._view.functions.get(name)
            kept = kept_by(function, self._view.versions) if function is not None else {}
            if kept:
                self.kept_by[name] = kept
            else:
                self.kept_by.pop(name, None)
        for node in sorted(stale):
            self._refresh_node(node)
        return bool(functions or stale)

    def _with_new_checkpoints(self, versions: Iterable[VersionKey]) -> set[NodeId]:
        """Notes the checkpoints of these versions. The nodes that have something of new ones already."""
        view, new, nodes = self._view, set[CheckpointId](), set[NodeId]()
        for key in versions:
            record = view.versions.get(key)
            weights = record.spec.weights if record is not None else None
            if record is None or weights is None or weights in self.checkpoints:
                continue
            self.checkpoints[weights] = checkpoint_of(record)
            new.add(weights)
            nodes.update(order.node for order in view.orders_of(key).values())
        if not new:
            return nodes
        for node, seen in view.nodes.items():
            held = (*(segment.checkpoint for segment in seen.report.segments), *seen.report.disk)
            if not new.isdisjoint(held):
                nodes.add(node)
        return nodes | {copy.node for copy in view.copies.values() if copy.checkpoint in new}

    def _refresh_node(self, node: NodeId) -> None:
        view, report = self._view, self.living(node)
        found: Mapping[CheckpointId, Holding] = {}
        self.peers.pop(node, None)
        self._fetches.pop(node, None)
        self._living.discard(node)
        if report is not None:
            self._living.add(node)
            orders, copies = view.orders_on(node).values(), view.copies_on(node).values()
            found = holdings_of(report, orders, view.statuses, copies, self.checkpoints)
            peer = peer_node(report)
            if peer is not None and node not in view.draining:
                self.peers[node] = peer
            if fetches := list(self._fetches_of(report, found)):
                self._fetches[node] = fetches
        for checkpoint in self._of_node.pop(node, frozenset()) - found.keys():
            self._holdings[checkpoint].pop(node, None)
            if not self._holdings[checkpoint]:
                del self._holdings[checkpoint]
        for checkpoint, holding in found.items():
            self._holdings[checkpoint][node] = holding
        if found:
            self._of_node[node] = frozenset(found)

    def living(self, node: NodeId) -> NodeReport | None:
        """The node's report, if it is under a lease."""
        seen = self._view.nodes.get(node)
        return seen.report if seen is not None and seen.absent_since_ns is None else None

    def _fetches_of(self, report: NodeReport, found: Mapping[CheckpointId, Holding]) -> Iterable[FetchUnderWay]:
        view = self._view
        segments = {one.checkpoint: one for one in report.segments if one.state != "failed"}
        for order in view.orders_on(report.node).values():
            weights = order.spec.weights
            known = self.checkpoints.get(weights) if weights is not None else None
            if weights is None or known is None or order.epoch != report.epoch:
                continue
            if is_fetching(order, view.statuses.get(order.worker), segments.get(weights), known):
                yield self.fetch(order, weights, chunks_needed(order, known), found.get(weights, EMPTY))
        for copy in view.copies_on(report.node).values():
            known, holding = self.checkpoints.get(copy.checkpoint), found.get(copy.checkpoint, EMPTY)
            if known is not None and copy.epoch == report.epoch and not holding.complete:
                yield self.fetch(copy, copy.checkpoint, known.every, holding)

    def fetch(
        self, order: WorkerOrder | CopyOrder, checkpoint: CheckpointId, needs: Ranges, holding: Holding
    ) -> FetchUnderWay:
        """The fetch that an order asks for, of a node that has this of its checkpoint."""
        since_unix_ns = holding.since_unix_ns or order.decided_unix_ns or order.ordered_unix_ns
        return FetchUnderWay(
            order=order, checkpoint=checkpoint, needs=without(needs, holding.host), since_unix_ns=since_unix_ns
        )

    def holders(self, checkpoint: CheckpointId) -> Mapping[NodeId, Holding]:
        """The living nodes that hold or fetch chunks of a checkpoint."""
        return self._holdings.get(checkpoint, {})

    def fetches(self) -> list[FetchUnderWay]:
        """All fetches, the first ordered first."""
        found = [one for some in self._fetches.values() for one in some]
        return sorted(found, key=lambda one: (one.since_unix_ns, one.order.node))

    def expect(self, node: NodeId, checkpoint: CheckpointId, holding: Holding) -> None:
        """Enters what an order that is about to be written will bring, for others of the same step. Afterwards the node
        is derived anew, from what came of it."""
        self._holdings[checkpoint][node] = holding
        self._of_node[node] = self._of_node.get(node, frozenset()) | {checkpoint}
        self._changes.nodes.add(node)
