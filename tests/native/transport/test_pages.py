"""Memory that is sent out of slabs without a copy: what a reader has not received is never another segment's."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from fleetstart.native import Region, SlabPool, TcpReader
from fleetstart.runtime.contract.node.peer_frames import ANSWER_BYTES, ReadRequest, Received
from tests.native.neighbours import Pages, until
from tests.native.transport.peers import CHUNK, Serving, outcomes, serving
from tests.testbed.network import Network

SLAB = 2 << 20
OLD, NEW = b"\x01" * CHUNK, b"\x02" * CHUNK
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two machines: only what leaves one is sent out of its slabs."""
    network = Network(["holder", "reader"], prefix="10.78.0")
    yield network
    network.close()


def connected(reader: socket.socket, listening: socket.socket, address: str) -> Pair:
    """The reader's end, with the least room for what comes, and the holder's, with room for a chunk that is sent."""
    with listening:
        listening.bind((address, 0))
        listening.listen()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        reader.connect(listening.getsockname())
        holder, _ = listening.accept()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * CHUNK)
    return reader, holder


def of_two_machines(network: Network) -> Pair:
    return connected(network.socket("reader"), network.socket("holder"), network.addresses["holder"])


def of_two_addresses() -> Pair:
    """Ends on this machine, with an address each."""
    reader = socket.socket()
    reader.bind(("127.0.0.2", 0))
    return connected(reader, socket.socket(), "127.0.0.1")


def sent_a_chunk(peer: Serving) -> bool:
    return until(lambda: peer.server.sent_bytes == CHUNK)


def pool_of(pages: Pages) -> SlabPool:
    return SlabPool("pages", pages=pages, slab_bytes=SLAB, capacity=2)


def filled(pool: SlabPool, content: bytes) -> Region:
    segment = pool.take(SLAB)
    segment.view(0, CHUNK)[:] = content
    return segment


def everything(sock: socket.socket) -> bytes:
    """All bytes that come until the end, without the head of the answer."""
    found = b""
    with sock:
        while more := sock.recv(CHUNK):
            found += more
    return found[ANSWER_BYTES:]


@pytest.mark.bed
def test_slabs_that_were_received_go_back_to_their_pool(pages: Pages, network: Network) -> None:
    pool = pool_of(pages)
    segment = filled(pool, OLD)
    into = SlabPool("into", pages="small", slab_bytes=SLAB, capacity=1).take(SLAB)
    pair = of_two_machines(network)
    reader = TcpReader(pair[0].fileno(), into)
    reader.submit(1, 0, CHUNK)
    with serving(pair=pair, segment=segment, idle_s=0.0) as peer:
        assert outcomes(reader, 1) == {1: "ok"}
        assert peer.ended() == "idle"
    del segment, peer
    assert bytes(into.view(0, CHUNK)) == OLD
    assert (pool.used, pool.clean + pool.dirty) == (0, pool.clean + 1)


@pytest.mark.bed
def test_slabs_that_may_be_on_their_way_are_not_used_again(pages: Pages, network: Network) -> None:
    pool = pool_of(pages)
    pool.release(2)
    segment = filled(pool, OLD)
    with serving(pair=of_two_machines(network), segment=segment) as peer:
        peer.socket.sendall(ReadRequest(request=1, offset=0, size_bytes=CHUNK).encode())
        kept = peer.socket.dup()
        assert sent_a_chunk(peer)
    del segment, peer
    assert pool.used == 0
    assert pages == "hugetlb" or pool.clean + pool.dirty == 0, "reserved huge pages are copied, not sent"
    again = filled(pool, NEW)
    assert everything(kept) == OLD
    del again


@pytest.mark.bed
@pytest.mark.parametrize(
    ("says", "half_closes", "idle_s", "ended"),
    [
        (Received(), True, 1e6, "closed"),
        (Received(leaves=True), False, 1e6, "left"),
        (Received(), False, 0.2, "idle"),
    ],
    ids=["closes", "leaves", "is idle"],
)
def test_what_a_reader_only_says_that_it_received_is_not_used_again(
    pages: Pages, network: Network, says: Received, half_closes: bool, idle_s: float, ended: str
) -> None:
    pool = pool_of(pages)
    pool.release(2)
    segment = filled(pool, OLD)
    with serving(pair=of_two_machines(network), segment=segment, idle_s=idle_s) as peer:
        peer.socket.sendall(ReadRequest(request=1, offset=0, size_bytes=CHUNK).encode())
        assert sent_a_chunk(peer)
        peer.socket.sendall(says.encode())
        if half_closes:
            peer.socket.shutdown(socket.SHUT_WR)
        assert peer.ended() == ended
        kept = peer.socket.dup()
    del segment, peer
    assert pages == "hugetlb" or pool.clean + pool.dirty == 0, "it is in the socket's queue yet"
    again = filled(pool, NEW)
    assert everything(kept) == OLD
    del again


def test_on_one_machine_the_reader_s_queue_has_copies(pages: Pages) -> None:
    pool = pool_of(pages)
    pool.release(2)
    segment = filled(pool, OLD)
    with serving(pair=of_two_addresses(), segment=segment) as peer:
        peer.socket.sendall(ReadRequest(request=1, offset=0, size_bytes=CHUNK).encode())
        assert sent_a_chunk(peer)
        peer.socket.sendall(Received().encode())
        peer.socket.shutdown(socket.SHUT_WR)
        assert peer.ended() == "closed"
        kept = peer.socket.dup()
    del segment, peer
    assert pool.clean + pool.dirty >= 1, "nothing but the segment had its memory"
    again = filled(pool, NEW)
    assert everything(kept) == OLD
    del again


@pytest.mark.bed
@pytest.mark.parametrize("kind", ["small"])
def test_a_pool_has_all_of_its_slabs_again(kind: Pages, network: Network) -> None:
    pool = pool_of(kind)
    for _ in range(4):
        segment = pool.take(2 * SLAB)
        with serving(pair=of_two_machines(network), segment=segment) as peer:
            peer.socket.sendall(ReadRequest(request=1, offset=0, size_bytes=CHUNK).encode())
            assert sent_a_chunk(peer)
        del segment, peer
    assert (pool.used, pool.clean, pool.dirty) == (0, 0, 0)
