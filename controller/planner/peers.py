"""Peers as a source of weights: the nodes that have a checkpoint's layers in host memory, or are receiving them, and
what a fetch beside the store and the disk takes from each.

A holder's uplink is shared like a link to the store (`links.contention`): a fetch that would break what another one was
promised does not use it. Only holders in the reader's region that it can reach count: no rate between regions is
known. The store is left alone as far as peers have the layers, unless it alone would be much quicker: it is the one
source that all share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple, Protocol

from fleetstart.runtime.contract.ids import CheckpointId, NodeId

from .checkpoint_layout import EVERY_LAYER, CheckpointLayout
from .links.contention import NEVER, Link, PendingFetch
from .links.division import FetchSource, divide
from .node_state import HeldLayers, NodeState
from .order_state import OrderState, link_factor, peer_layers
from .plan import PeerShare

PEERS_MOST = 4
"""Holders that a fetch reads from: two saturate a link as fast as their own, more are for those that are busy."""
STORE_WORTH = 0.85
"""Maximum duration of a fetch from the store alone, relative to one from peers, for it to be preferred."""


class PeerSource(NamedTuple):
    """Layers that a node has for others, and its uplink at the time of the decision."""

    node: NodeId
    region: str
    layers: int
    up: Link
    machine: str
    """The machine whose nodes alone reach it; empty: any."""
    after_s: float = 0.0
    """Time until it has them all itself."""

    @property
    def promised(self) -> bool:
        """True if fetches from it have deadlines."""
        return any(fetch.deadline_s < NEVER for fetch in self.up.fetches)

    @property
    def bytes_per_s(self) -> float:
        """Its uplink's share for one more fetch."""
        return self.up.bytes_per_s / (len(self.up.fetches) + 1)


class Fetch(NamedTuple):
    """The predicted fetch of a stage on a node."""

    missing_bytes: int
    store_bytes: int
    seconds: float
    peers: tuple[PeerShare, ...] = ()
    peer_bytes: int = 0

    @property
    def disk_bytes(self) -> int:
        return max(0, self.missing_bytes - self.store_bytes - self.peer_bytes)


def peer_sources(holders: Iterable[NodeState], checkpoint: CheckpointId, now_s: float) -> list[PeerSource]:
    """What these nodes have for others, the least busy first; layers that they are receiving come behind."""
    there: list[PeerSource] = []
    coming: list[PeerSource] = []
    for state in holders:
        held, up = state.held.get(checkpoint), state.up
        if held is None or up is None:
            continue
        if up.fetches:
            up = up.at(now_s)
        if held.host:
            there.append(PeerSource(state.node, state.region, held.host, up, state.peers_on))
        if held.coming & ~held.host:
            after_s = state.link.pending_s(checkpoint, now_s)
            coming.append(PeerSource(state.node, state.region, held.coming & ~held.host, up, state.peers_on, after_s))
    if len(there) > 1:
        there = sorted(there, key=_busyness)[:PEERS_MOST]
    return there + (sorted(coming, key=_busyness)[:PEERS_MOST] if coming else coming)


def _busyness(source: PeerSource) -> tuple[float, float, NodeId]:
    return (-source.bytes_per_s, source.after_s, source.node)


class ReadingNode(Protocol):
    """The node that a fetch is for."""

    state: NodeState
    link: Link
    """Its link at the time of the decision."""
    held: HeldLayers | None
    files_bytes: int
    """Packages and volumes that come from the store beside the weights."""


class Division(NamedTuple):
    """A fetch divided over peers, disk and store."""

    peers: tuple[PeerShare, ...]
    peer_bytes: int
    disk_bytes: float
    store_bytes: int
    up_s: float
    """Time until the last of the peers has sent its part."""


NOBODY: frozenset[NodeId] = frozenset()


class PeerPool:
    """The peers of one request. Caches divisions: nodes that hold nothing all get the same."""

    def __init__(self, sources: Sequence[PeerSource], layout: CheckpointLayout, now_s: float) -> None:
        self.ups = {source.node: source.up for source in sources}
        """Uplink by peer."""
        self._sources = sources
        self._layout = layout
        self._now_s = now_s
        self._copies = all([source.layers == EVERY_LAYER and not source.after_s for source in sources])
        """True if each of them has all: then shares are by their rates alone."""
        self._divisions: dict[tuple[int, str, str, NodeId | None], Division | None] = {}
        """By layers, or of copies by bytes, and by what decides which peers are near."""

    def fetch(
        self, layers: int, missing_bytes: int, reader: ReadingNode, refused: Set[NodeId] = NOBODY
    ) -> Fetch | None:
        """The fetch of missing layers with the help of peers that do not refuse it; None if these have none of them."""
        state, held = reader.state, reader.held
        on_disk = held.disk & layers if held is not None else 0
        if on_disk or refused:
            divided = self._divide(layers, state, on_disk, refused)
        else:
            copies, node = self._copies, state.node
            key = (missing_bytes if copies else layers, state.region, state.machine, node if node in self.ups else None)
            try:
                divided = self._divisions[key]
            except KeyError:
                divided = self._by_rates(missing_bytes, state) if copies else self._divide(layers, state, 0, NOBODY)
                self._divisions[key] = divided
        if divided is None:
            return None
        store_bytes = divided.store_bytes + (reader.files_bytes if divided.store_bytes else 0)
        seconds = max(
            divided.up_s,
            reader.link.fetch_s(state.link_bytes(store_bytes, divided.peer_bytes), self._now_s),
            divided.peer_bytes / state.from_peers_bytes_per_s,
            divided.disk_bytes / state.disk_bytes_per_s,
        )
        return Fetch(missing_bytes, divided.store_bytes, seconds, divided.peers, divided.peer_bytes)

    def _by_rates(self, size_bytes: int, state: NodeState) -> Division | None:
        """Divides a fetch over nodes that have all."""
        near = self._usable(EVERY_LAYER, state, NOBODY)
        if not near or not size_bytes:
            return None
        rate = sum([source.bytes_per_s for source in near])
        took_s = size_bytes / rate
        named = tuple([PeerShare(source.node, round(source.bytes_per_s * took_s)) for source in near])
        if any([source.up.fetches for source in near]):
            took_s = max([source.up.fetch_s(source.bytes_per_s * took_s, self._now_s) for source in near])
        return Division(named, size_bytes, 0.0, 0, took_s)

    def _divide(self, layers: int, state: NodeState, on_disk: int, refused: Set[NodeId]) -> Division | None:
        """Divides a fetch over the nodes that have the layers, and for layers that none has, over those that receive
        them; or over all of these, if the uplinks of the others are so busy that it is quicker."""
        near = self._usable(layers, state, refused)
        if not near:
            return None
        if not near[-1].after_s:  # those that receive it come last
            return self._division(layers, state, on_disk, near)
        had = 0
        for source in near:
            had |= 0 if source.after_s else source.layers
        there = [source if not source.after_s else source._replace(layers=source.layers & ~had) for source in near]
        best = self._division(layers, state, on_disk, there)
        if any(source.after_s and source.layers & had for source in near):
            relayed = self._division(layers, state, on_disk, near)
            if best is None or (relayed is not None and relayed.up_s < best.up_s):
                return relayed
        return best

    def _usable(self, layers: int, state: NodeState, refused: Set[NodeId]) -> list[PeerSource]:
        """The peers that have or receive some of the layers and that the node can reach."""
        node, region, machine = state.node, state.region, state.machine
        return [
            source
            for source in self._sources
            if source.layers & layers
            and source.node != node
            and source.region == region
            and (not source.machine or source.machine == machine)
            and source.node not in refused
        ]

    def _division(self, layers: int, state: NodeState, on_disk: int, near: Sequence[PeerSource]) -> Division | None:
        size_bytes, now_s = self._layout.size_bytes, self._now_s
        if len(near) == 1 and not on_disk:  # the usual case, and the quickest
            source = near[0]
            got_bytes = size_bytes(layers & source.layers)
            up_s = max(source.up.fetch_s(got_bytes, now_s), source.after_s)
            rest_bytes = size_bytes(layers & ~source.layers)
            return Division((PeerShare(source.node, got_bytes),), got_bytes, 0.0, rest_bytes, up_s)
        sources, elsewhere = [], on_disk
        for source in near:
            sources.append(FetchSource(source.layers, source.bytes_per_s))
            elsewhere |= source.layers
        if on_disk:
            sources.append(FetchSource(on_disk, state.disk_bytes_per_s))
        shares = divide(layers, sources, size_bytes)
        from_peers: dict[NodeId, int] = {}
        up_s = 0.0
        for source, share in zip(near, shares, strict=False):
            if share >= 1:  # a node that has some layers and receives others is there twice
                from_peers[source.node] = from_peers.get(source.node, 0) + round(share)
                up_s = max(up_s, source.up.fetch_s(from_peers[source.node], now_s), source.after_s)
        if not from_peers:
            return None
        named = tuple([PeerShare(node, size) for node, size in from_peers.items()])
        store_bytes = size_bytes(layers & ~elsewhere)
        return Division(named, sum(from_peers.values()), shares[-1] if on_disk else 0.0, store_bytes, up_s)


def uploads(reader: NodeState, orders: Iterable[OrderState]) -> list[tuple[NodeId, PendingFetch]]:
    """What a node's starting workers still fetch from each peer that their orders name, as its link tells. Peers are
    taken to be equally fast."""
    pending = {fetch.checkpoint: fetch for fetch in reader.link.fetches}
    found: list[tuple[NodeId, PendingFetch]] = []
    for ordered in orders:
        order = ordered.order
        fetch = pending.get(order.spec.weights) if order.spec.weights is not None and ordered.starting else None
        if fetch is None or fetch.worker != order.worker or not order.sources:
            continue
        left = fetch.pending_bytes / link_factor(ordered, reader.link_bytes(0, 1)) / max(1, ordered.size_bytes)
        sources = [FetchSource(ordered.layout.layers_in(source.ranges), 1.0) for source in order.sources]
        shares = divide(peer_layers(ordered), sources, ordered.layout.size_bytes)
        found += [
            (source.node, fetch._replace(pending_bytes=share * left))
            for source, share in zip(order.sources, shares, strict=True)
            if share >= 1
        ]
    return found
