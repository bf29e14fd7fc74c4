"""New pulls for a multicast under way that has lost a node. Pure.

What the others have by then is where the new plan begins, and every chunk that one of them lacks comes from a living
node that has it, or will have it by the same plan. What nobody has any more is in no pull: it comes from wherever a
fetch without a plan takes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fleetstart.runtime.contract.ids import NodeId

from ..planner.multicast import MulticastNode, MulticastRequest, ReceiverPlan, plan_multicast
from .holder_index import FetchUnderWay
from .holdings import EMPTY, Checkpoint, Holding
from .sources import SOURCES_MAX, PeerNode, Reader, reaches


def is_spoilt(fetch: FetchUnderWay, peers: Collection[NodeId]) -> bool:
    """True if the plan that the fetch follows names a node that is no peer any more."""
    return bool(fetch.order.pulls) and any(peer.node not in peers for peer in fetch.peers)


def replanned(
    fetches: Sequence[FetchUnderWay],
    checkpoint: Checkpoint,
    holders: Mapping[NodeId, Holding],
    peers: Mapping[NodeId, PeerNode],
) -> dict[NodeId, ReceiverPlan]:
    """The new part of each node whose fetch of this checkpoint follows a plan, if one of these plans is spoilt. Empty
    if none is, or if no living node has anything to give."""
    followers = [fetch for fetch in fetches if fetch.order.pulls and fetch.order.node in peers]
    if not any(is_spoilt(fetch, peers) for fetch in followers):
        return {}
    receivers = dict.fromkeys(fetch.order.node for fetch in followers)
    sources = _sources(followers, [peers[node] for node in receivers], holders, peers)
    nodes = [
        *(_node(peers[node], ((0, checkpoint.chunks),), receives=False) for node in sources if node not in receivers),
        *(_node(peers[node], holders.get(node, EMPTY).host, receives=True) for node in receivers),
    ]
    ends = tuple(checkpoint.layout.ends_chunks) if checkpoint.layout is not None else ()
    plan = plan_multicast(
        MulticastRequest(
            nodes=tuple(nodes), size_bytes=checkpoint.size_bytes, chunks=checkpoint.chunks, first_chunks=ends
        )
    )
    return {part.node: part for part in plan.receivers if part.pulls}


def _sources(
    followers: Sequence[FetchUnderWay],
    receivers: Sequence[PeerNode],
    holders: Mapping[NodeId, Holding],
    peers: Mapping[NodeId, PeerNode],
) -> list[NodeId]:
    """Nodes with all chunks that every receiver reaches: those that the plans name, else others of their region."""
    readers = [Reader(node=one.node, region=one.region, machine=one.machine, since_unix_ns=0) for one in receivers]
    whole = [
        node
        for node, holding in holders.items()
        if holding.complete and node in peers and all(reaches(reader, peers[node]) for reader in readers)
    ]
    named = {peer.node for fetch in followers for peer in fetch.peers}
    regions = {one.region for one in receivers}
    near = [node for node in whole if peers[node].region in regions]
    best = sorted(near, key=lambda node: (-peers[node].bytes_per_s, node))[:SOURCES_MAX]
    return [node for node in whole if node in named] or best


def _node(peer: PeerNode, held: Sequence[tuple[int, int]], *, receives: bool) -> MulticastNode:
    return MulticastNode(
        node=peer.node,
        up_bytes_per_s=peer.bytes_per_s,
        down_bytes_per_s=peer.bytes_per_s,
        held=tuple(held),
        receives=receives,
    )
