"""The global parameter pool: what follows from who holds which chunks.

`ParameterPool` belongs to the controller that schedules. It gives new orders their sources, changes those of fetches
under way when holders come or go or grants are about to end, makes the peer keys of nodes that lack one, and decides
about copies. It writes nothing: the scheduler does, under its fence. All is derived from the view, so another scheduler
goes on where this one ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from fleetstart.runtime.contract.ids import CheckpointId, NodeId, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.node.peers import CopyOrder, Peer, Pull, SealedPeerKey
from fleetstart.runtime.contract.node.reports import NodeReport

from ..planner.multicast import ReceiverPlan
from ..state.identity_records import PeerKeyRecord
from ..state.view import View
from .chunk_ranges import without
from .copies import CopyNode, decide_copies
from .grants import granted, still_valid
from .holder_index import FetchUnderWay, HolderIndex
from .holdings import EMPTY, Holding, chunks_coming, chunks_needed
from .kept import CopyProgress, all_kept, copy_node, copy_of
from .replanning import is_spoilt, replanned
from .sources import SOURCES_MAX, ChosenHolder, Reader, readers_of, sources_for

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


class ParameterPool:
    def __init__(self, view: View, keys: PeerKeys) -> None:
        self._view = view
        self._keys = keys
        self._index = HolderIndex(view)
        self._progress = CopyProgress()
        self._looked_ns: int | None = None
        self.unplaced: tuple[CheckpointId, ...] = ()
        """Kept checkpoints for which no node has room."""

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
        self._index.refresh()
        done: dict[WorkerId, WorkerOrder] = {}
        load = self._load()
        new = [one for one in orders if one.wanted == "run" and not one.sources and one.worker not in self._view.orders]
        for order in sorted(new, key=lambda one: (one.decided_unix_ns, one.node)):
            weights, report = order.spec.weights, self._index.living(order.node)
            known = self._index.checkpoints.get(weights) if weights is not None else None
            if weights is None or known is None or report is None:
                continue
            holding = self._held(order.node, weights)
            if holding.complete:
                continue
            needs = chunks_needed(order, known)
            fetch = self._index.fetch(order, weights, needs, holding)
            sources = self._granted(fetch, self._chosen(fetch, load, planned.get(order.worker, ())), now_unix_ns)
            pulls = order.pulls if [peer.node for peer in sources] == list(planned.get(order.worker, ())) else ()
            done[order.worker] = msgspec.structs.replace(order, sources=sources, pulls=pulls)
            for peer in sources:
                load[peer.node] = load.get(peer.node, 0) + 1
            if not holding.since_unix_ns:  # others of this step may read from it
                coming = without(chunks_coming(order, known), holding.host)
                expected = Holding(
                    host=holding.host, coming=coming, disk=holding.disk, since_unix_ns=order.decided_unix_ns
                )
                self._index.expect(order.node, weights, expected)
        return [done.get(order.worker, order) for order in orders]

    def _load(self) -> dict[NodeId, int]:
        """How many fetches under way read from each node."""
        return readers_of([[peer.node for peer in one.peers] for one in self._index.fetches()])

    def _chosen(
        self,
        fetch: FetchUnderWay,
        load: Mapping[NodeId, int],
        planned: Sequence[NodeId] = (),
        *,
        others: bool = True,
    ) -> tuple[ChosenHolder, ...]:
        """The peers of a fetch: those that it has, or else those that were planned, and then others, unless these are
        not asked for."""
        node = fetch.order.node
        report = self._index.living(node)
        holders = self._index.holders(fetch.checkpoint)
        kept = [peer.node for peer in fetch.peers] or list(planned)
        if not others:
            holders = {node: holders[node] for node in kept if node in holders}
        peers = {
            other: peer
            for other in dict.fromkeys((*holders, *kept))
            if (peer := self._index.peers.get(other)) is not None and self._keys.key(other, peer.epoch) is not None
        }
        if report is None or not peers:
            return ()
        known = self._index.checkpoints.get(fetch.checkpoint)
        if fetch.order.pulls and known is not None and all(other in peers for other in kept):
            # The plan of a multicast tells when each has what another one pulls.
            return tuple(ChosenHolder(other, known.every) for other in kept)
        reader = Reader(
            node=node,
            region=report.region,
            machine=report.machine,
            since_unix_ns=fetch.since_unix_ns,
            needs=fetch.needs,
        )
        return sources_for(reader, holders, peers, load, kept=kept)

    def _granted(self, fetch: FetchUnderWay, sources: Sequence[ChosenHolder], now_unix_ns: int) -> tuple[Peer, ...]:
        """The peers as the fetch's order names them, with new grants."""
        found = []
        for source in sources:
            peer = self._index.peers[source.node]
            key = self._keys.key(peer.node, peer.epoch)
            if key is not None:
                found.append(granted(source, peer, fetch.order.node, fetch.checkpoint, key, now_unix_ns // 1_000_000))
        return tuple(found)

    def _changed_fetches(self, now_unix_ns: int) -> Iterable[WorkerOrder | CopyOrder]:
        """Orders of fetches whose holders or grants are to be others."""
        load = self._load()
        now_unix_ms = now_unix_ns // 1_000_000
        fetches = self._index.fetches()
        plans = self._replanned(fetches)
        for fetch in fetches:
            plan = plans.get((fetch.order.node, fetch.checkpoint)) if fetch.order.pulls else None
            if plan is not None:
                every = self._index.checkpoints[fetch.checkpoint].every
                planned = [ChosenHolder(node, every) for node in plan.peers]
                yield _changed(fetch, self._granted(fetch, planned, now_unix_ns), plan.pulls, now_unix_ns)
                continue
            if len(fetch.peers) == SOURCES_MAX:  # as many as there may be: most often these are still the ones
                same = self._chosen(fetch, load, others=False)
                if still_valid(fetch.peers, same, self._index.peers, now_unix_ms):
                    continue
            others = dict(load)
            for peer in fetch.peers:
                others[peer.node] = others.get(peer.node, 1) - 1
            sources = self._chosen(fetch, others)
            if still_valid(fetch.peers, sources, self._index.peers, now_unix_ms):
                continue
            load, fresh = others, self._granted(fetch, sources, now_unix_ns)
            for peer in fresh:
                load[peer.node] = load.get(peer.node, 0) + 1
            pulls = fetch.order.pulls if [one.node for one in fresh] == [one.node for one in fetch.peers] else ()
            yield _changed(fetch, fresh, pulls, now_unix_ns)

    def _replanned(self, fetches: Sequence[FetchUnderWay]) -> dict[tuple[NodeId, CheckpointId], ReceiverPlan]:
        """New parts in the multicasts under way that have lost a node."""
        usable = {
            node: peer for node, peer in self._index.peers.items() if self._keys.key(node, peer.epoch) is not None
        }
        found = {}
        for checkpoint in {fetch.checkpoint for fetch in fetches if is_spoilt(fetch, usable)}:
            of_it = [fetch for fetch in fetches if fetch.checkpoint == checkpoint]
            known, holders = self._index.checkpoints[checkpoint], self._index.holders(checkpoint)
            for node, plan in replanned(of_it, known, holders, usable).items():
                found[node, checkpoint] = plan
        return found

    # ── one step ───────────────────────────────────────────────────────────────────────────────────

    def step(self, now_ns: int, now_unix_ns: int) -> PoolChanges:
        """What is to be written now; usually nothing."""
        due = self._looked_ns is None or now_ns - self._looked_ns >= TICK_NS
        if not self._index.refresh(look=due) and not due:
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
        if len(self._index.peers) < 2:
            return
        made = 0
        for node, peer in self._index.peers.items():
            report = self._index.living(node)
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
        if not self._index.kept_by and not view.copies:
            self.unplaced = ()
            return
        kept = all_kept(self._index.kept_by.values())
        reports = {node: report for node in view.nodes if (report := self._index.living(node)) is not None}
        self._progress.observe(view.copies.values(), reports, now_ns)
        nodes = [self._copy_node(report, kept) for node, report in reports.items() if node not in view.draining]
        copies = [
            copy_of(
                order,
                self._held(order.node, order.checkpoint),
                region=view.nodes[order.node].report.region if order.node in view.nodes else None,
                living=not view.worker_lost(WorkerId(""), order.node, order.epoch, view.synced_ns),
                leaves=order.node in view.draining or order.checkpoint in self._progress.refused(order.node),
            )
            for order in view.copies.values()
        ]
        decision = decide_copies(kept, copies, nodes)
        self.unplaced = tuple(decision.unplaced)
        changes.deleted_copies += [view.copies[key] for key in decision.take_back if key not in decision.order]
        changes.copies += self._copy_orders(decision.order, reports, now_unix_ns)

    def _copy_node(self, report: NodeReport, kept: Collection[CheckpointId]) -> CopyNode:
        node, orders = report.node, self._view.orders_on(report.node).values()
        refused = self._progress.refused(node)
        return copy_node(report, orders, self._view.statuses, lambda one: self._held(node, one), kept, refused)

    def _held(self, node: NodeId, checkpoint: CheckpointId) -> Holding:
        return self._index.holders(checkpoint).get(node, EMPTY)

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
            known = self._index.checkpoints.get(checkpoint)
            holding = self._held(node, checkpoint)
            if known is not None and not holding.complete:
                fetch = self._index.fetch(order, checkpoint, known.every, holding)
                peers = self._granted(fetch, self._chosen(fetch, load), now_unix_ns)
                order = msgspec.structs.replace(order, peers=peers)
            yield order


def _changed(
    fetch: FetchUnderWay, sources: tuple[Peer, ...], pulls: tuple[Pull, ...], now_unix_ns: int
) -> WorkerOrder | CopyOrder:
    """The fetch's order, with these sources and pulls."""
    if isinstance(fetch.order, WorkerOrder):
        return fetch.order.changed(now_unix_ns, sources=sources, pulls=pulls)
    ordered_unix_ns = max(now_unix_ns, fetch.order.ordered_unix_ns + 1)
    return msgspec.structs.replace(fetch.order, peers=sources, pulls=pulls, ordered_unix_ns=ordered_unix_ns)
