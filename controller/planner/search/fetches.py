"""Predicted fetches: of a stage on a node, and of a group, whose stages share the uplinks of their peers."""

from __future__ import annotations

from collections.abc import Sequence, Set

from fleetstart.runtime.contract.ids import NodeId

from ..checkpoint_layout import Cut
from ..peers import NOBODY, STORE_WORTH, Fetch, PeerPool, PeerSource
from ..plan import PlanRequest
from .node_filter import CandidateNode


class FetchPredictor:
    """Predicts the fetches of one request at one time. Hot."""

    def __init__(self, request: PlanRequest, peers: Sequence[PeerSource], now_s: float) -> None:
        """`peers`: what nodes have of the checkpoint for others."""
        self._layout = request.layout
        self._has_weights = request.segment_bytes > 0
        self._peers = PeerPool(peers, request.layout, now_s)
        self._any_peer = bool(peers)
        self._now_s = now_s
        self._shared_fetches: dict[tuple[int, ...], list[Fetch] | None] = {}
        """Cached fetches of groups that use peers, by their size and their nodes."""

    def of_stage(self, cut: Cut, node: CandidateNode) -> Fetch:
        """The fetch of a stage on a node, cached there."""
        cached = node.fetches.get(cut)
        if cached is None:
            cached = node.fetches[cut] = self._predict(cut, node)
        return cached

    def _predict(self, cut: Cut, node: CandidateNode, refused: Set[NodeId] = NOBODY) -> Fetch:
        """Predicts the fetch of a stage on a node, without peers or with those that do not refuse it. Where these are
        about as quick as the store, the store is left alone; beside the disk they must be quicker."""
        alone = self._predict_alone(cut, node)
        if not self._any_peer or not alone.seconds:
            return alone
        node.alone[cut] = alone
        held = node.held
        missing = cut.layers if held is None else cut.layers & ~(held.host | held.coming)
        helped = self._peers.fetch(missing, alone.missing_bytes, node, refused)
        if helped is None:
            return alone
        if held is not None and cut.layers & held.coming & ~held.host:
            helped = helped._replace(seconds=max(helped.seconds, node.coming_s))
        if alone.store_bytes:
            return alone if alone.seconds < STORE_WORTH * helped.seconds else helped
        return helped if helped.seconds < STORE_WORTH * alone.seconds else alone

    def _predict_alone(self, cut: Cut, node: CandidateNode) -> Fetch:
        """Predicts a fetch without peers. Host memory is free, disk and store are read in parallel at their own
        rates."""
        held, size_bytes = node.held, cut.size_bytes
        if not self._has_weights:
            return Fetch(0, 0, 0.0)
        if held is None:
            return Fetch(size_bytes, size_bytes, self._from_store_s(size_bytes + node.files_bytes, node))
        missing = cut.layers & ~(held.host | held.coming)
        store_bytes = self._layout.size_bytes(missing & ~held.disk)
        fetch_bytes = self._layout.size_bytes(missing)
        on_link_bytes = store_bytes + node.files_bytes if store_bytes else 0
        seconds = max(
            self._from_store_s(on_link_bytes, node), (fetch_bytes - store_bytes) / node.state.disk_bytes_per_s
        )
        if cut.layers & held.coming & ~held.host:
            seconds = max(seconds, node.coming_s)
        return Fetch(fetch_bytes, store_bytes, seconds)

    def _from_store_s(self, size_bytes: int, node: CandidateNode) -> float:
        return node.link.fetch_s(size_bytes, self._now_s) if node.link.fetches else size_bytes / node.bytes_per_s

    def link_accepts(self, cut: Cut, node: CandidateNode) -> bool:
        """True if the node's link accepts the stage's fetch without breaking the deadlines of others."""
        return not node.link.fetches or self._accepts(self.of_stage(cut, node), node)

    def _accepts(self, fetch: Fetch, node: CandidateNode) -> bool:
        return node.link.accepts(node.state.link_bytes(fetch.store_bytes, fetch.peer_bytes), self._now_s)

    def of_group(self, cuts: tuple[Cut, ...], nodes: list[CandidateNode]) -> list[Fetch] | None:
        """The fetches of a group, which share the uplinks of their peers: no uplink's promises to others are broken.
        None if the links to the store cannot take what these refuse."""
        fetches = [self.of_stage(cut, node) for cut, node in zip(cuts, nodes, strict=True)]
        if not self._any_peer or not any([fetch.peers for fetch in fetches]):
            return fetches
        if len(fetches) == 1 and not any([self._peers.ups[peer].fetches for peer, _ in fetches[0].peers]):
            return fetches
        key = (len(cuts), *map(id, nodes))
        if key not in self._shared_fetches:
            self._shared_fetches[key] = self._share_uplinks(cuts, nodes, fetches)
        return self._shared_fetches[key]

    def _share_uplinks(
        self, cuts: tuple[Cut, ...], nodes: list[CandidateNode], fetches: list[Fetch]
    ) -> list[Fetch] | None:
        ups, now_s = self._peers.ups, self._now_s
        fetches, refused, reverted = list(fetches), set[NodeId](), False
        while True:
            taken_bytes: dict[NodeId, int] = {}
            for fetch in fetches:
                for peer, size_bytes in fetch.peers:
                    taken_bytes[peer] = taken_bytes.get(peer, 0) + size_bytes
            refusing = [
                peer for peer, size in taken_bytes.items() if ups[peer].fetches and not ups[peer].accepts(size, now_s)
            ]
            if refusing:
                refused.update(refusing)
                fetches = [
                    self._predict(cut, node, refused) if fetch.peers else fetch
                    for cut, node, fetch in zip(cuts, nodes, fetches, strict=True)
                ]
                continue
            up_s = {peer: ups[peer].fetch_s(size, now_s) for peer, size in taken_bytes.items()}
            shared_s = [max([fetch.seconds, *[up_s[peer] for peer, _ in fetch.peers]]) for fetch in fetches]
            # One by one, stages leave uplinks that they share for too long: the store gives them theirs sooner.
            stage = max(range(len(cuts)), key=lambda index: shared_s[index] if fetches[index].peers else 0.0)
            alone = nodes[stage].alone.get(cuts[stage]) or self._predict_alone(cuts[stage], nodes[stage])
            if not fetches[stage].peers or alone.seconds >= STORE_WORTH * shared_s[stage]:
                break
            fetches[stage], reverted = alone, True
        if (refused or reverted) and not all(
            self._accepts(fetch, node) for fetch, node in zip(fetches, nodes, strict=True)
        ):
            return None
        return [fetch._replace(seconds=seconds) for fetch, seconds in zip(fetches, shared_s, strict=True)]
