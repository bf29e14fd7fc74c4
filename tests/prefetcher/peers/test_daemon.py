"""A node daemon among peers: what it reports, who reads its memory, and the key that the controller sealed for it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import msgspec
import pytest

from fleetstart.controller.auth.secret_sealing import seal_values
from fleetstart.prefetcher.peers.connections import PeerConnections
from fleetstart.prefetcher.segments.store import SegmentStore
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import Version, new_worker_id
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.node.peers import (
    PEER_KEY_BYTES,
    PEER_KEY_NAME,
    CopyOrder,
    Grant,
    Peer,
    Pull,
    SealedPeerKey,
    grant_secret,
    peer_key_bound_to,
)
from tests.prefetcher.nodes import HELLO, Node, Store, spec_of
from tests.prefetcher.peers.holders import READER, Holder, Reading, holder_of, no_certificate
from tests.prefetcher.peers.tampering import Harm, Tampering
from tests.prefetcher.peers.test_fetch import fetched, fetching
from tests.prefetcher.stages import Gated, Model
from tests.servers import wait_until


def give_key(node: Node) -> bytes:
    """Seals a key for the node, as a controller does."""
    key, report = os.urandom(PEER_KEY_BYTES), node.lease()
    bound = peer_key_bound_to(node.id, report.epoch)
    sealed = seal_values({PEER_KEY_NAME: key.hex()}, report.public_key, bound)
    node.client.set(keys.peer_key(node.id), msgspec.json.encode(SealedPeerKey(epoch=report.epoch, sealed=sealed)))
    return key


def peer_of(node: Node, model: Model, key: bytes) -> Peer:
    report = node.lease()
    expires = int((time.time() + 60) * 1000)
    grant = Grant(
        checkpoint=model.checkpoint, holder=node.id, epoch=report.epoch, reader=READER, expires_unix_ms=expires
    )
    return Peer(node=node.id, address=report.peer_address, grant=grant, secret=grant_secret(grant, key))


def test_another_node_reads_the_weights_of_a_worker_until_its_daemon_is_killed(
    node: Node, store: Store, model: Model, gated: Gated
) -> None:
    report = node.lease()
    assert (report.peer_address.split(":")[0], report.peer_host) == ("127.0.0.1", "")
    assert report.peer_transports == ("tcp",)
    worker = node.order(spec_of(store.put_bundle({"handler.py": HELLO}), weights=model.checkpoint))
    node.wait_for(worker, "ready")

    reading, connections, peer = Reading(model), PeerConnections(no_certificate), peer_of(node, model, give_key(node))
    assert reading.read(peer, connections) == model.manifest.chunks
    assert reading.is_right
    connections.close()
    wait_until(lambda: node.lease().peer_sent_bytes == len(model.data), what="the bytes in the report")

    slow = Tampering(peer.address, Harm(2 * model.manifest.chunk_bytes, drip_s=0.01))
    peer = msgspec.structs.replace(peer, address=slow.address, ranges=((0, len(model.manifest.chunks)),))

    async def killed_in_mid_chunk(segments: SegmentStore) -> None:
        fetch = asyncio.create_task(fetched(segments, model, peer))
        await asyncio.to_thread(wait_until, lambda: segments.fetched_bytes.get("peer"), what="a chunk from the peer")
        node.kill()
        await fetch
        assert segments.fetched_bytes["store"] > 0

    fetching(gated, killed_in_mid_chunk)
    slow.close()


@pytest.fixture
def holder(model: Model, store: Store) -> Iterator[Holder]:
    holder = holder_of(model, store.folder)
    yield holder
    holder.close()


def test_a_worker_and_a_copy_come_from_the_peers_that_their_orders_name(
    node: Node, store: Store, model: Model, holder: Holder
) -> None:
    bundle = store.put_bundle({"handler.py": HELLO})
    spec = spec_of(bundle, weights=model.checkpoint)
    order = WorkerOrder(
        worker=new_worker_id(),
        node=node.id,
        epoch=node.epoch,
        version=Version(1),
        spec=spec,
        ordered_unix_ns=time.time_ns(),
        sources=(holder.peer(model.checkpoint, reader=node.id),),
        pulls=(Pull(0, 0, 9), Pull(-1, 9, 10)),
    )
    node.write(order)
    status = node.wait_for(order.worker, "ready")
    chunk_bytes = model.manifest.chunk_bytes
    assert status.fetched == {"peer": len(model.data) - chunk_bytes, "store": chunk_bytes}

    other = Model(store, layers=3)
    holder.hold(other.checkpoint)
    copy = CopyOrder(
        node=node.id,
        epoch=node.epoch,
        checkpoint=other.checkpoint,
        peers=(holder.peer(other.checkpoint, reader=node.id),),
        ordered_unix_ns=time.time_ns(),
    )
    node.client.hset(keys.copies(node.id), other.checkpoint, msgspec.json.encode(copy))
    total = len(model.data) - chunk_bytes + len(other.data)
    wait_until(lambda: node.lease().fetched_bytes == {"peer": total, "store": chunk_bytes}, what="the copy")
    assert "secret" not in node.log()
