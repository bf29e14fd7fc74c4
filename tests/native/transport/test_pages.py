"""Memory that is sent out of slabs without a copy: what a reader has not received is never another segment's."""

from __future__ import annotations

import socket

import pytest

from fleetstart.native import SlabPool, TcpReader
from fleetstart.runtime.contract.node.peer_frames import ANSWER_BYTES, ReadRequest
from tests.native.neighbours import Pages, until
from tests.native.transport.peers import CHUNK, Serving, outcomes, serving

SLAB = 2 << 20
OLD, NEW = b"\x01" * CHUNK, b"\x02" * CHUNK


def from_another_address() -> tuple[socket.socket, socket.socket]:
    """Two ends of different addresses, as of two machines."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname(), source_address=("127.0.0.2", 0))
        theirs, _ = listening.accept()
    return ours, theirs


def sent_a_chunk(peer: Serving) -> bool:
    return until(lambda: peer.server.sent_bytes == CHUNK)


def pool_of(pages: Pages) -> SlabPool:
    return SlabPool("pages", pages=pages, slab_bytes=SLAB, capacity=2)


def test_slabs_that_were_received_go_back_to_their_pool(pages: Pages) -> None:
    pool = pool_of(pages)
    segment = pool.take(SLAB)
    segment.view(0, CHUNK)[:] = OLD
    into = SlabPool("into", pages="small", slab_bytes=SLAB, capacity=1).take(SLAB)
    pair = from_another_address()
    reader = TcpReader(pair[0].fileno(), into)
    reader.submit(1, 0, CHUNK)
    with serving(pair=pair, segment=segment, idle_s=0.0) as peer:
        assert outcomes(reader, 1) == {1: "ok"}
        assert peer.ended() == "idle"
    del segment, peer
    assert bytes(into.view(0, CHUNK)) == OLD
    assert (pool.used, pool.clean + pool.dirty) == (0, pool.clean + 1)


def test_slabs_that_may_be_on_their_way_are_not_used_again(pages: Pages) -> None:
    pool = pool_of(pages)
    pool.release(2)
    segment = pool.take(SLAB)
    segment.view(0, CHUNK)[:] = OLD
    with serving(pair=from_another_address(), segment=segment) as peer:
        peer.socket.sendall(ReadRequest(request=1, offset=0, size_bytes=CHUNK).encode())
        kept = peer.socket.dup()
        assert sent_a_chunk(peer)
    del segment, peer
    assert pool.used == 0
    assert pages == "hugetlb" or pool.clean + pool.dirty == 0, "reserved huge pages are copied, not sent"
    again = pool.take(SLAB)
    again.view(0, CHUNK)[:] = NEW
    with kept:
        found = b""
        while more := kept.recv(CHUNK):
            found += more
    assert found[ANSWER_BYTES:] == OLD


@pytest.mark.parametrize("kind", ["small"])
def test_a_pool_has_all_of_its_slabs_again(kind: Pages) -> None:
    pool = pool_of(kind)
    for _ in range(4):
        segment = pool.take(2 * SLAB)
        with serving(pair=from_another_address(), segment=segment) as peer:
            peer.socket.sendall(ReadRequest(request=1, offset=0, size_bytes=CHUNK).encode())
            assert sent_a_chunk(peer)
        del segment, peer
    assert (pool.used, pool.clean, pool.dirty) == (0, 0, 0)
