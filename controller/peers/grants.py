"""Grants: leave for a node to read a checkpoint's chunks in another node's memory, for some minutes. Pure.

A grant names reader, holder, the holder's epoch and the checkpoint, and ends by itself. While a fetch is under way its
order is renewed before the grants end; nothing has to be taken back. A node knows its own peer key and no other, so it
can forge leave to read its own memory, and that only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetstart.runtime.contract.ids import CheckpointId, NodeId
from fleetstart.runtime.contract.node.peers import Grant, Peer, grant_secret

from .sources import ChosenHolder, PeerNode

GRANT_MS = 5 * 60_000
"""Length of a grant: time for a large model over a slow link between two renewals; and how long a reader that was
taken over may still read what it was granted."""
RENEW_MS = 2 * 60_000
"""Rest of a grant at which it is renewed: some renewals may be late, and clocks differ."""


def granted(
    source: ChosenHolder, peer: PeerNode, reader: NodeId, checkpoint: CheckpointId, peer_key: bytes, now_unix_ms: int
) -> Peer:
    """The peer as an order names it, with a new grant."""
    grant = Grant(
        checkpoint=checkpoint,
        holder=peer.node,
        epoch=peer.epoch,
        reader=reader,
        expires_unix_ms=now_unix_ms + GRANT_MS,
    )
    return Peer(
        node=peer.node,
        address=peer.address,
        host=peer.host,
        transports=peer.transports,
        grant=grant,
        secret=grant_secret(grant, peer_key),
        ranges=source.ranges,
    )


def still_valid(
    known: Sequence[Peer], sources: Sequence[ChosenHolder], peers: Mapping[NodeId, PeerNode], now_unix_ms: int
) -> bool:
    """True if an order's peers say what newly signed ones for these sources would, with grants that last."""
    return len(known) == len(sources) and all(
        _said(one) == _says(source, peers[source.node]) and _lasts(one, now_unix_ms)
        for one, source in zip(known, sources, strict=True)
    )


def _said(peer: Peer) -> tuple[object, ...]:
    return (peer.node, peer.grant.epoch, peer.address, peer.host, peer.transports, peer.ranges)


def _says(source: ChosenHolder, peer: PeerNode) -> tuple[object, ...]:
    return (peer.node, peer.epoch, peer.address, peer.host, peer.transports, source.ranges)


def _lasts(peer: Peer, now_unix_ms: int) -> bool:
    """True if the grant need not be renewed. One that seems to last too long is of before a clock stepped back."""
    return RENEW_MS < peer.grant.expires_unix_ms - now_unix_ms <= GRANT_MS + RENEW_MS
