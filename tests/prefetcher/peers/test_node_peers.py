"""Two nodes with certificates that read from each other, as their daemons have it wired."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import pytest

from fleetstart import native
from fleetstart.prefetcher.network.node_identity import NodeCertificate
from fleetstart.prefetcher.peers.node_peers import NodePeers
from fleetstart.prefetcher.segments.feeds import FetchMemory
from fleetstart.prefetcher.segments.store import SegmentStore
from fleetstart.prefetcher.sources.errors import SourceError
from fleetstart.runtime.contract.identity import node_host
from fleetstart.runtime.contract.ids import NodeId
from tests.prefetcher.nodes import Store
from tests.prefetcher.peers.holders import EPOCH, HOLDER, READER, Holder, Reading, holder_of
from tests.prefetcher.stages import Model
from tests.tls.identities import JOIN, authority, node_identity

AUTHORITY = authority()
NOWHERE = FetchMemory(weakref.ref(native.SlabPool("n", pages="small", slab_bytes=4096, capacity=1).take(1)), 4096, ())
"""Memory that is gone: what reads by TCP is told where the bytes go."""


def certificate_of(node: str, folder: Path) -> NodeCertificate:
    return NodeCertificate(node, folder / f"{node}.json", node_identity(AUTHORITY, node), [])


async def opened(
    node: NodeId, segments: SegmentStore, certificate: NodeCertificate | None, key: bytes, *, encrypted: bool
) -> NodePeers:
    async def read_key() -> bytes:
        return key

    peers = NodePeers(node=node, epoch=EPOCH, read_key=read_key)
    peers.open("127.0.0.1", certificate, segments, encrypted=encrypted)
    return peers


def own_peers(holder: Holder, node: NodeId, certificate: NodeCertificate | None, *, encrypted: bool) -> NodePeers:
    return holder.run(opened(node, holder.segments, certificate, holder.key, encrypted=encrypted))


def test_nodes_read_over_tls_with_their_own_certificates(model: Model, store: Store, tmp_path: Path) -> None:
    holder = holder_of(model, store.folder)
    serving = own_peers(holder, HOLDER, certificate_of(HOLDER, tmp_path), encrypted=True)
    reading = own_peers(holder, READER, certificate_of(READER, tmp_path), encrypted=True)
    assert serving.host == node_host(HOLDER, JOIN)
    holder.address, holder.host = serving.address, serving.host
    found = Reading(model)
    assert found.read_by(reading.chunks(holder.peer(model.checkpoint), NOWHERE)) == model.manifest.chunks
    assert found.is_right

    thief = own_peers(holder, NodeId("thief"), certificate_of("thief", tmp_path), encrypted=True)
    plain = own_peers(holder, NodeId("plain"), None, encrypted=False)
    for other in (thief, plain):
        with pytest.raises(SourceError):
            Reading(model).read_by(other.chunks(holder.peer(model.checkpoint), NOWHERE))
    assert (plain.host, plain.transports) == ("", ("tcp",))
    for peers in (serving, reading, thief, plain):
        holder.run(peers.close())
    holder.close()


def test_a_node_that_cannot_listen_has_no_server(model: Model, store: Store) -> None:
    holder = holder_of(model, store.folder)

    async def open_elsewhere() -> NodePeers:
        async def read_key() -> bytes:
            return os.urandom(32)

        peers = NodePeers(node=HOLDER, epoch=EPOCH, read_key=read_key)
        peers.open("192.0.2.1", None, holder.segments, encrypted=False)
        return peers

    peers = holder.run(open_elsewhere())
    assert (peers.address, peers.transports, peers.sent_bytes) == ("", (), 0)
    holder.run(peers.close())
    holder.close()
