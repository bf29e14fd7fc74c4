"""The global parameter pool: who holds which chunks, kept up to date in place, and what follows from it.

`ParameterPool` belongs to the controller that schedules. It gives new orders their sources, changes those of fetches
under way when holders come or go or grants are about to end, makes the peer keys of nodes that lack one, and decides
about copies. It writes nothing: the scheduler does, under its fence. All is derived from the view, so another scheduler
goes on where this one ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, NodeId, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.node.peers import CopyOrder, Peer, SealedPeerKey
from fleetstart.runtime.contract.node.reports import NodeReport

from ..state.identity_records import PeerKeyRecord
from ..state.records import VersionKey
from ..state.view import View
from .chunk_ranges import Ranges, without
from .copies import KeptCheckpoint, decide_copies
from .grants import granted, still_valid
from .holdings import EMPTY, Checkpoint, Holding, checkpoint_of, chunks_needed, holdings_of, is_fetching
from .kept import CopyProgress, all_kept, copy_node, copy_of, kept_by
from .sources import PeerNode, Reader, Source, peer_node, readers_of, sources_for

KEYS_AT_ONCE = 20
"""Peer keys made in one step, some milliseconds of the loop."""
TICK_NS = 1_000_000_000
"""Interval at which grants and the progress of copies are looked at, though nothing has changed."""
NOTHING_PLANNED: Mapping[WorkerId, Sequence[NodeId]] = {}


@dataclass(frozen=True, slots=True)
class MadePeerKey:
    """A new peer key, for controllers and for its node."""

    record: PeerKeyRecord
    sealed: SealedPeerKey


class PeerKeys(Protocol):
    """The keys that grants are signed with."""

    def key(self, node: NodeId, epoch: str) -> bytes | None: ...

    def make(self, report: NodeReport) -> MadePeerKey | None: ...


@dataclass(slots=True)
class PoolChanges:
    """What is to be written."""

    orders: list[WorkerOrder] = field(default_factory=list)
    copies: list[CopyOrder] = field(default_factory=list)
    deleted_copies: list[CopyOrder] = field(default_factory=list)
    peer_keys: list[MadePeerKey] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.orders or self.copies or self.deleted_copies or self.peer_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetch:
    """A fetch under way: of a worker, or of a copy."""

    order: WorkerOrder | CopyOrder
    checkpoint: CheckpointId
    needs: Ranges
    since_unix_ns: int

    @property
    def peers(self) -> tuple[Peer, ...]:
        return self.order.sources if isinstance(self.order, WorkerOrder) else self.order.peers


class ParameterPool:
    def __init__(self, view: View, keys: PeerKeys) -> None:
        self._view = view
        self._keys = keys
        self._changes = view.follow()
        self._changes.nodes.update(view.nodes)
        self._changes.versions.update(view.versions)
        self._changes.functions.update(view.functions)
        self._checkpoints: dict[CheckpointId, Checkpoint] = {}
        self._kept_by: dict[FunctionName, dict[CheckpointId, KeptCheckpoint]] = {}
        self._peers: dict[NodeId, PeerNode] = {}
        self._holdings: dict[CheckpointId, dict[NodeId, Holding]] = defaultdict(dict)
        self._of_node: dict[NodeId, frozenset[CheckpointId]] = {}
        self._fetches: dict[NodeId, list[_Fetch]] = {}
        self._progress = CopyProgress()
        self._looked_ns: int | None = None
        self.unplaced: tuple[CheckpointId, ...] = ()
        """Kept checkpoints for which no node has room."""

    # ── what is known ──────────────────────────────────────────────────────────────────────────────

    def _refresh(self) -> bool:
        """Brings holdings up to date with the view; whether anything may be different."""
        functions, versions, stale = (
            self._changes.take_functions(),
            self._changes.take_versions(),
            self._changes.take_nodes(),
        )
        stale |= self._with_new_checkpoints(versions)
        for name in functions:
            function = self._view.functions.get(name)
            kept = kept_by(function, self._view.versions) if function is not None else {}
            if kept:
                self._kept_by[name] = kept
            else:
                self._kept_by.pop(name, None)
        for node in sorted(stale):
            self._refresh_node(node)
        return bool(functions or stale)

    def _with_new_checkpoints(self, versions: Iterable[VersionKey]) -> set[NodeId]:
        """Notes the checkpoints of these versions. The nodes that have something of new ones already."""
        view, new, nodes = self._view, set[CheckpointId](), set[NodeId]()
        for key in versions:
            record = view.versions.get(key)
            weights = record.spec.weights if record is not None else None
            if record is None or weights is None or weights in self._checkpoints:
                continue
            self._checkpoints[weights] = checkpoint_of(record)
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
        view, report = self._view, self._living(node)
        found: Mapping[CheckpointId, Holding] = {}
        self._peers.pop(node, None)
        self._fetches.pop(node, None)
        if report is not None:
            orders, copies = view.orders_on(node).values(), view.copies_on(node).values()
            found = holdings_of(report, orders, view.statuses, copies, self._checkpoints)
            peer = peer_node(report)
            if peer is not None and node not in view.draining:
                self._peers[node] = peer
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

    def _living(self, node: NodeId) -> NodeReport | None:
        """The node's report, if it is under a lease."""
        seen = self._view.nodes.get(node)
        return seen.report if seen is not None and seen.absent_since_ns is None else None

    def _fetches_of(self, report: NodeReport, found: Mapping[CheckpointId, Holding]) -> Iterable[_Fetch]:
        view = self._view
        segments = {one.checkpoint: one for one in report.segments if one.state != "failed"}
        for order in view.orders_on(report.node).values():
            weights = order.spec.weights
            known = self._checkpoints.get(weights) if weights is not None else None
            if weights is None or known is None or order.epoch != report.epoch:
                continue
            if is_fetching(order, view.statuses.get(order.worker), segments.get(weights), known):
                yield self._fetch(order, weights, chunks_needed(order, known), found.get(weights, EMPTY))
        for copy in view.copies_on(report.node).values():
            known, holding = self._checkpoints.get(copy.checkpoint), found.get(copy.checkpoint, EMPTY)
            if known is not None and copy.epoch == report.epoch and not holding.complete:
                yield self._fetch(copy, copy.checkpoint, known.every, holding)

    def _fetch(
        self, order: WorkerOrder | CopyOrder, checkpoint: CheckpointId, needs: Ranges, holding: Holding
    ) -> _Fetch:
        since_unix_ns = holding.since_unix_ns or order.decided_unix_ns or order.ordered_unix_ns
        return _Fetch(
            order=order, checkpoint=checkpoint, needs=without(needs, holding.host), since_unix_ns=since_unix_ns
        )

    def holders(self, checkpoint: CheckpointId) -> Mapping[NodeId, Holding]:
        """The living nodes that hold or fetch chunks of a checkpoint."""
        return self._holdings.get(checkpoint, {})

    # ── sources ────────────────────────────────────────────────────────────────────────────────────

    def with_sources(
        self,
        orders: Sequence[WorkerOrder],
        now_unix_ns: int,
        planned: Mapping[WorkerId, Sequence[NodeId]] = NOTHING_PLANNED,
    ) -> list[WorkerOrder]:
        """The orders of a step, those of new workers with the peers that they are to read from. `planned`: the peers
        that their starts were predicted with, which come first."""
        if len(self._view.nodes) < 2:
            return list(orders)
        self._refresh()
        done: dict[WorkerId, WorkerOrder] = {}
        load = self._load()
        new = [one for one in orders if one.wanted == "run" and not one.sources and one.worker not in self._view.orders]
        for order in sorted(new, key=lambda one: (one.decided_unix_ns, one.node)):
            weights, report = order.spec.weights, self._living(order.node)
            known = self._checkpoints.get(weights) if weights is not None else None
            if weights is None or known is None or report is None:
                continue
            holding = self._holdings.get(weights, {}).get(order.node, EMPTY)
            if holding.complete:
                continue
            needs = chunks_needed(order, known)
            fetch = self._fetch(order, weights, needs, holding)
            sources = self._chosen(fetch, load, now_unix_ns, planned.get(order.worker, ()))
            pulls = order.pulls if [peer.node for peer in sources] == list(planned.get(order.worker, ())) else ()
            done[order.worker] = msgspec.structs.replace(order, sources=sources, pulls=pulls)
            for peer in sources:
                load[peer.node] = load.get(peer.node, 0) + 1
            if not holding.since_unix_ns:  # others of this step may read from it
                coming = Holding(host=holding.host, coming=without(needs, holding.host), disk=holding.disk,
                                 since_unix_ns=order.decided_unix_ns)  # fmt: skip
                self._holdings[weights][order.node] = coming
                self._of_node[order.node] = self._of_node.get(order.node, frozenset()) | {weights}
                self._changes.nodes.add(order.node)
        return [done.get(order.worker, order) for order in orders]

    def _load(self) -> dict[NodeId, int]:
        """How many fetches under way read from each node."""
        return readers_of([[peer.node for peer in one.peers] for some in self._fetches.values() for one in some])

    def _chosen(
        self, fetch: _Fetch, load: Mapping[NodeId, int], now_unix_ns: int, planned: Sequence[NodeId] = ()
    ) -> tuple[Peer, ...]:
        """The peers of a fetch, with new grants: those that it has, or else those that were planned, before others."""
        node = fetch.order.node
        report = self._living(node)
        holdings = self._holdings.get(fetch.checkpoint, {})
        keys = {
            other: key
            for other in {*holdings, *planned, *(peer.node for peer in fetch.peers)}
            if (peer := self._peers.get(other)) is not None and (key := self._keys.key(other, peer.epoch)) is not None
        }
        if report is None or not keys:
            return ()
        now_unix_ms = now_unix_ns // 1_000_000
        kept = [peer.node for peer in fetch.peers] or list(planned)
        known = self._checkpoints.get(fetch.checkpoint)
        if fetch.order.pulls and known is not None and all(other in keys for other in kept):
            # The plan of a multicast tells when each has what another one pulls.
            sources = tuple(Source(other, known.every) for other in kept)
        else:
            reader = Reader(
                node=node,
                region=report.region,
                machine=report.machine,
                since_unix_ns=fetch.since_unix_ns,
                needs=fetch.needs,
            )
            sources = sources_for(reader, holdings, {other: self._peers[other] for other in keys}, load, kept=kept)
        return tuple(
            granted(source, self._peers[source.node], node, fetch.checkpoint, keys[source.node], now_unix_ms)
            for source in sources
        )

    def _changed_fetches(self, now_unix_ns: int) -> Iterable[WorkerOrder | CopyOrder]:
        """Orders of fetches whose holders or grants are to be others."""
        load = self._load()
        fetches = [one for some in self._fetches.values() for one in some]
        for fetch in sorted(fetches, key=lambda one: (one.since_unix_ns, one.order.node)):
            others = dict(load)
            for peer in fetch.peers:
                others[peer.node] = others.get(peer.node, 1) - 1
            fresh = self._chosen(fetch, others, now_unix_ns)
            if still_valid(fetch.peers, fresh, now_unix_ns // 1_000_000):
                continue
            load = others
            for peer in fresh:
                load[peer.node] = load.get(peer.node, 0) + 1
            pulls = fetch.order.pulls if [one.node for one in fresh] == [one.node for one in fetch.peers] else ()
            if isinstance(fetch.order, WorkerOrder):
                yield fetch.order.changed(now_unix_ns, sources=fresh, pulls=pulls)
            else:
                yield msgspec.structs.replace(
                    fetch.order,
                    peers=fresh,
                    pulls=pulls,
                    ordered_unix_ns=max(now_unix_ns, fetch.order.ordered_unix_ns + 1),
                )

    # ── one step ───────────────────────────────────────────────────────────────────────────────────

    def step(self, now_ns: int, now_unix_ns: int) -> PoolChanges:
        """What is to be written now; usually nothing."""
        due = self._looked_ns is None or now_ns - self._looked_ns >= TICK_NS
        if not self._refresh() and not due:
            return PoolChanges()
        self._looked_ns = now_ns
        changes = PoolChanges(peer_keys=list(self._missing_keys()))
        self._decide_copies(changes, now_ns, now_unix_ns)
        taken = {(one.node, one.checkpoint) for one in changes.deleted_copies}
        for order in self._changed_fetches(now_unix_ns):
            if isinstance(order, WorkerOrder):
                changes.orders.append(order)
            elif (order.node, order.checkpoint) not in taken:
                changes.copies.append(order)
        return changes

    def _missing_keys(self) -> Iterable[MadePeerKey]:
        """Keys for the nodes that have none for their epoch. A node alone needs none: nobody reads from it."""
        if len(self._peers) < 2:
            return
        made = 0
        for node, peer in self._peers.items():
            report = self._living(node)
            if report is None or not report.public_key or self._keys.key(node, peer.epoch) is not None:
                continue
            key = self._keys.make(report)
            if key is not None:
                yield key
            made += 1
            if made == KEYS_AT_ONCE:
                return

    def _decide_copies(self, changes: PoolChanges, now_ns: int, now_unix_ns: int) -> None:
        view = self._view
        if not self._kept_by and not view.copies:
            self.unplaced = ()
            return
        kept = all_kept(self._kept_by.values())
        reports = {node: report for node in view.nodes if (report := self._living(node)) is not None}
        self._progress.observe(view.copies.values(), reports, now_ns)
        nodes = [
            copy_node(
                report, view.orders_on(node).values(), view.statuses, self._holdings, kept, self._progress.refused(node)
            )
            for node, report in reports.items()
            if node not in view.draining
        ]
        copies = [
            copy_of(
                order,
                self._holdings.get(order.checkpoint, {}).get(order.node, EMPTY),
                living=not view.worker_lost(WorkerId(""), order.node, order.epoch, now_ns),
                leaves=order.node in view.draining or order.checkpoint in self._progress.refused(order.node),
            )
            for order in view.copies.values()
        ]
        decision = decide_copies(kept, copies, nodes)
        self.unplaced = tuple(decision.unplaced)
        changes.deleted_copies += [view.copies[key] for key in decision.take_back if key not in decision.order]
        changes.copies += self._copy_orders(decision.order, reports, now_unix_ns)

    def _copy_orders(
        self, placed: Collection[tuple[NodeId, CheckpointId]], reports: Mapping[NodeId, NodeReport], now_unix_ns: int
    ) -> Iterable[CopyOrder]:
        load = self._load()
        for node, checkpoint in placed:
            others = [one.decided_unix_ns for one in self._view.copies.values() if one.checkpoint == checkpoint]
            at_unix_ns = max([now_unix_ns, *(other + 1 for other in others)])
            order = CopyOrder(
                node=node,
                epoch=reports[node].epoch,
                checkpoint=checkpoint,
                ordered_unix_ns=at_unix_ns,
                decided_unix_ns=at_unix_ns,
            )
            known = self._checkpoints.get(checkpoint)
            holding = self._holdings.get(checkpoint, {}).get(node, EMPTY)
            if known is not None and not holding.complete:
                peers = self._chosen(self._fetch(order, checkpoint, known.every, holding), load, now_unix_ns)
                order = msgspec.structs.replace(order, peers=peers)
            yield order
