"""Reads by RDMA that go on by TCP, with connections that die in place of RDMA's; RDMA itself is in tests/rdma."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from fleetstart import native
from fleetstart.prefetcher.network.rdma_devices import rdma_devices
from fleetstart.prefetcher.peers.connections import Connection, PeerConnections
from fleetstart.prefetcher.peers.rdma import NodeRdma, RdmaLink, RdmaReads, open_rdma
from fleetstart.prefetcher.peers.reader import PeerChunks
from fleetstart.prefetcher.sources.errors import SourceLost
from fleetstart.runtime.contract.node.peers import Peer
from tests.prefetcher.nodes import CHUNK_BYTES, Store
from tests.prefetcher.peers.holders import Holder, Reading, holder_of, no_certificate
from tests.prefetcher.stages import Model


@pytest.fixture
def holder(model: Model, store: Store) -> Iterator[Holder]:
    holder = holder_of(model, store.folder)
    yield holder
    holder.close()


class Counting(NodeRdma):
    """A node's device that is none."""

    def __init__(self) -> None:
        self.received_bytes = 0

    def note_received(self, size_bytes: int) -> None:
        self.received_bytes += size_bytes


class Dying(RdmaLink):
    """A connection that brings a few chunks, over TCP, and is lost."""

    def __init__(self, connection: Connection, peer: Peer, most: int) -> None:
        fd = connection.link.native_fd()
        assert fd is not None
        self._tcp = native.TcpReader(fd, None, 5.0)
        super().__init__(self._tcp, peer)  # type: ignore[arg-type]
        self._most = most

    def submit_into(self, request: int, offset: int, into: memoryview, wait_s: float = 0.0) -> None:
        self._tcp.submit_into(request, offset, into, wait_s)

    def poll(self, timeout_s: float) -> list[native.Completion]:
        found = self._tcp.poll(timeout_s)
        self._most -= len(found)
        if self._most < 0:
            self._tcp.cancel()
        return found


class DyingReads(RdmaReads):
    """`most`: chunks that each connection brings; below 0, none is made."""

    def __init__(self, connections: PeerConnections, most: int) -> None:
        self.node = Counting()
        self._connections = connections
        self._most = most
        self.taken = 0

    def take(self, peer: Peer) -> RdmaLink:
        self.taken += 1
        if self._most < 0:
            raise ConnectionError("no way by RDMA")
        connection = self._connections.take(peer, fresh=True)
        try:
            return Dying(connection, peer, self._most)
        finally:
            connection.link.close()

    def give_back(self, link: RdmaLink) -> None:
        pass


@pytest.mark.parametrize("most", [-1, 0, 3, 1000])
def test_what_rdma_does_not_bring_comes_by_tcp_and_once(
    holder: Holder, model: Model, caplog: pytest.LogCaptureFixture, most: int
) -> None:
    connections = PeerConnections(no_certificate)
    reads = DyingReads(connections, most)
    peer = msgspec.structs.replace(holder.peer(model.checkpoint), transports=("rdma", "tcp"))
    source, reading = PeerChunks(peer, connections, reads), Reading(model)
    for _ in range(2):
        assert reading.read_by(source) == model.manifest.chunks
        assert reading.is_right
    whole = most > len(model.manifest.chunks)
    assert reads.taken == (2 if whole else 1), "a link that died is not tried again in this fetch"
    expected = 2 * len(model.data) if whole else max(0, most) * CHUNK_BYTES
    assert reads.node.received_bytes >= expected
    assert ("reads by RDMA go on by TCP" in caplog.text) != whole
    connections.close()


def test_rdma_is_tried_again_when_its_link_ended_with_a_grant_that_was_renewed(holder: Holder, model: Model) -> None:
    connections = PeerConnections(no_certificate)
    peer = msgspec.structs.replace(holder.peer(model.checkpoint), transports=("rdma", "tcp"))
    later = msgspec.structs.replace(holder.peer(model.checkpoint, life_s=90), transports=("rdma", "tcp"))

    class Renewed(DyingReads):
        def take(self, peer: Peer) -> RdmaLink:
            source.renew(later)
            return super().take(peer)

    reads = Renewed(connections, 2)
    source = PeerChunks(peer, connections, reads)
    for taken in (1, 2, 2):
        assert Reading(model).read_by(source) == model.manifest.chunks
        assert reads.taken == taken
    connections.close()


@pytest.mark.parametrize("fields", [{}, {"host": "holder.example"}], ids=["tcp alone", "inside TLS"])
def test_rdma_is_not_tried_with_a_peer_that_does_not_offer_it_or_expects_tls(
    holder: Holder, model: Model, fields: dict[str, Any]
) -> None:
    connections = PeerConnections(no_certificate)
    reads = DyingReads(connections, -1)
    transports = ("rdma", "tcp") if fields else ("tcp",)
    peer = msgspec.structs.replace(holder.peer(model.checkpoint), transports=transports, **fields)
    source = PeerChunks(peer, connections, reads)
    if fields:
        with pytest.raises(Exception, match="no certificate"):
            Reading(model).read_by(source)
    else:
        assert Reading(model).read_by(source) == model.manifest.chunks
    assert not reads.taken
    connections.close()


def test_a_holder_without_a_device_refuses_rdma_and_nothing_else(holder: Holder, model: Model) -> None:
    connections, peer = PeerConnections(no_certificate), holder.peer(model.checkpoint)
    with pytest.raises(SourceLost, match="no_rdma"):
        connections.take(peer, transport="rdma")
    assert Reading(model).read(peer, connections) == model.manifest.chunks
    connections.close()


def test_a_node_without_a_usable_device_has_none_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        found = open_rdma()
    assert (found is not None) == any(device.usable for device in rdma_devices())
    assert found is not None or not caplog.records
