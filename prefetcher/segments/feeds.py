"""Peers as sources of a segment: which chunks each has, what a changed order adds, and the plan of their pulls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from fleetstart import native
from fleetstart.runtime.contract.ids import CheckpointId, NodeId
from fleetstart.runtime.contract.node.peers import Peer, Pull
from fleetstart.runtime.contract.weights.manifest import ChunkRange

from ..fetch.chunk_sources import ChunkSource, FetchSource
from ..fetch.fetcher import Fetch
from ..fetch.pulls import PullPlan

PEER_THREADS = 4
"""Connections to one peer; with TLS, each has a core at either end."""
PATIENCE_S = 4.0
"""Time for a chunk of a peer that another source has: a peer may have to wait for it itself."""


class PeerSource(ChunkSource, Protocol):
    """A peer as a source of chunks."""

    def renew(self, peer: Peer) -> None:
        """Uses a later grant of the same peer from now on."""
        ...


@dataclass(frozen=True, slots=True)
class FetchMemory:
    """Memory of a segment, which its fetch fills. A reference to this object keeps none of it."""

    region: weakref.ref[native.Region]
    slab_bytes: int
    granted: Collection[int]
    """Slabs that may be filled; more may come."""


OpenPeer = Callable[[Peer, FetchMemory], PeerSource]


@dataclass(frozen=True, slots=True)
class Feed:
    """What an order says of where chunks come from."""

    peers: tuple[Peer, ...] = ()
    pulls: tuple[Pull, ...] = ()

    def of(self, checkpoint: CheckpointId) -> Feed:
        """The feed, if its grants are for that checkpoint; the peers keep their places, which pulls count by."""
        return self if all(peer.grant.checkpoint == checkpoint for peer in self.peers) else NO_FEED


NO_FEED = Feed()


class SegmentFeed:
    """The peers of one segment's fetch."""

    def __init__(
        self, open_peer: OpenPeer, memory: FetchMemory, chunks: Sequence[ChunkRange], rates: dict[str, float]
    ) -> None:
        self._open_peer = open_peer
        self._memory = memory
        self._chunks = chunks
        self._rates = rates
        self._sources: dict[NodeId, PeerSource] = {}
        self._indices: dict[NodeId, int] = {}
        self._store_index = 0
        self._pulls: tuple[Pull, ...] = ()

    def begin(
        self, feed: Feed, before: Sequence[FetchSource], store: FetchSource
    ) -> tuple[list[FetchSource], PullPlan]:
        """All sources of a fetch, the store last, and its plan."""
        sources = list(before)
        for peer in feed.peers:
            if peer.node not in self._indices:
                self._indices[peer.node] = len(sources)
                sources.append(self._source(peer))
        self._store_index = len(sources)
        return [*sources, store], self._plan(feed)

    def update(self, fetch: Fetch, feed: Feed) -> None:
        """What a changed order adds to a fetch under way."""
        for peer in feed.peers:
            if peer.node in self._indices:
                self._sources[peer.node].renew(peer)
                fetch.extend_source(self._indices[peer.node], self._of(peer))
            else:
                self._indices[peer.node] = fetch.add_source(self._source(peer))
        if feed.pulls and feed.pulls != self._pulls:
            fetch.replan(self._plan(feed))

    def _source(self, peer: Peer) -> FetchSource:
        source = self._sources[peer.node] = self._open_peer(peer, self._memory)
        return FetchSource(
            source,
            self._of(peer),
            PEER_THREADS,
            spare=True,
            patience_s=PATIENCE_S,
            bytes_per_s=self._rates.get(source.name),
        )

    def _of(self, peer: Peer) -> list[ChunkRange]:
        return [chunk for chunk in self._chunks if any(begin <= chunk.index < end for begin, end in peer.ranges)]

    def _plan(self, feed: Feed) -> PullPlan:
        self._pulls = feed.pulls
        known = {chunk.index for chunk in self._chunks}
        pulls = []
        for pull in feed.pulls:
            if pull.peer < 0:
                index: int | None = self._store_index
            else:
                index = self._indices.get(feed.peers[pull.peer].node) if pull.peer < len(feed.peers) else None
            if index is not None:
                pulls.append((index, [chunk for chunk in range(pull.first, pull.end) if chunk in known]))
        return PullPlan(pulls)
