"""Pulls over TCP between two ends of this process: ranges, waiting for chunks, refusals, deadlines, cancellation."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.native import NativeError, TcpReader
from tests.native.neighbours import PATIENCE_S, attached, open_descriptors, until
from tests.native.transport.peers import (
    CHUNK,
    CHUNKS,
    CONTENT,
    LATER_MS,
    SIZE,
    SLAB,
    checksum,
    completions,
    content_of,
    outcomes,
    region,
    serving,
    tcp_pair,
    whole,
)


@pytest.mark.parametrize("pair", [tcp_pair, socket.socketpair])
@pytest.mark.parametrize("slab_bytes", [SLAB, CHUNK])
def test_chunks_arrive_bit_exact_with_their_checksums(pair: object, slab_bytes: int) -> None:
    assert callable(pair)
    with serving(pair=pair(), slab_bytes=slab_bytes) as peer:
        filled = region()
        reader = TcpReader(peer.socket.fileno(), filled)
        for chunk in range(CHUNKS):
            reader.submit(chunk, chunk * CHUNK, CHUNK)
        found = completions(reader, CHUNKS)
        assert {one.request: (one.status, one.checksum) for one in found} == {
            chunk: ("ok", checksum(CONTENT[chunk * CHUNK : (chunk + 1) * CHUNK])) for chunk in range(CHUNKS)
        }
        assert whole(filled) == CONTENT
        assert peer.server.sent_bytes == SIZE
        assert reader.error is None


@st.composite
def ranges(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Ranges that do not overlap, each in one slab of the reader, in any order."""
    found: list[tuple[int, int]] = []
    for slab in range(SIZE // SLAB):
        cuts = sorted(draw(st.sets(st.integers(0, SLAB), max_size=6)))
        pairs = zip(cuts[::2], cuts[1::2], strict=False)
        found += [(slab * SLAB + begin, end - begin) for begin, end in pairs]
    return draw(st.permutations(found))


@settings(max_examples=25, deadline=None)
@given(ranges(), st.sampled_from([CHUNK, SLAB, 2 * SLAB]))
def test_exactly_the_ranges_that_were_asked_for_are_written(asked: list[tuple[int, int]], slab_bytes: int) -> None:
    with serving(slab_bytes=slab_bytes) as peer:
        filled = region(content=b"\xee" * SIZE)
        reader = TcpReader(peer.socket.fileno(), filled)
        expected = bytearray(b"\xee" * SIZE)
        for number, (offset, size_bytes) in enumerate(asked):
            reader.submit(number, offset, size_bytes)
            expected[offset : offset + size_bytes] = CONTENT[offset : offset + size_bytes]
        found = completions(reader, len(asked))
        assert whole(filled) == expected
        assert {one.request: one.checksum for one in found} == {
            number: checksum(bytes(expected[offset : offset + size_bytes]))
            for number, (offset, size_bytes) in enumerate(asked)
        }


def test_a_chunk_on_its_way_is_answered_when_it_is_ready_and_others_go_first() -> None:
    with serving(ready=[5]) as peer:
        filled = region()
        reader = TcpReader(peer.socket.fileno(), filled)
        for chunk in (3, 4, 5):
            reader.submit(chunk, chunk * CHUNK, CHUNK, PATIENCE_S)
        assert [one.request for one in completions(reader, 1)] == [5]
        assert reader.poll(0.01) == []
        peer.control.mark_ready(4)
        assert [one.request for one in completions(reader, 1)] == [4]
        reader.submit(6, 5 * CHUNK, CHUNK, PATIENCE_S)
        assert [one.request for one in completions(reader, 1)] == [6]
        peer.control.mark_ready(3)
        assert [one.request for one in completions(reader, 1)] == [3]
        assert content_of(filled, 3 * CHUNK, CHUNK) == CONTENT[3 * CHUNK : 4 * CHUNK]


def test_a_range_of_several_chunks_waits_for_the_last() -> None:
    with serving(ready=[0, 2]) as peer:
        reader = TcpReader(peer.socket.fileno(), region())
        reader.submit(1, 0, 3 * CHUNK, PATIENCE_S)
        assert reader.poll(0.01) == []
        peer.control.mark_ready(1)
        assert outcomes(reader, 1) == {1: "ok"}


def test_what_is_not_ready_gone_or_not_granted_is_said() -> None:
    with serving(ready=[0, 1, 7], allowed=[(0, 2), (2, 4), (7, 8)]) as peer:
        filled = region(content=b"\xee" * SIZE)
        reader = TcpReader(peer.socket.fileno(), filled)
        reader.submit(0, 2 * CHUNK, CHUNK)
        reader.submit(1, 2 * CHUNK, CHUNK, 0.02)
        reader.submit(2, 4 * CHUNK, CHUNK, PATIENCE_S)
        reader.submit(3, 7 * CHUNK + 1, CHUNK - 1)
        reader.submit(4, 6 * CHUNK, CHUNK + 1)
        assert outcomes(reader, 5) == {0: "not_ready", 1: "not_ready", 2: "refused", 3: "ok", 4: "refused"}
        reader.submit(5, 0, 3 * CHUNK, PATIENCE_S)
        peer.control.fail("store_error", "gone")
        reader.submit(6, 0, 2 * CHUNK)
        assert outcomes(reader, 2) == {5: "gone", 6: "ok"}
        assert content_of(filled, 2 * CHUNK, 2 * CHUNK) == b"\xee" * 2 * CHUNK


def test_many_readers_and_streams_at_once() -> None:
    filled = region()

    def pull(first: int) -> None:
        with serving() as peer:
            reader = TcpReader(peer.socket.fileno(), filled)
            for chunk in range(first, CHUNKS, 4):
                reader.submit(chunk, chunk * CHUNK, CHUNK)
                assert outcomes(reader, 1) == {chunk: "ok"}

    threads = [threading.Thread(target=pull, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert whole(filled) == CONTENT


def test_bytes_go_into_a_buffer_that_is_held_until_they_are_there() -> None:
    with serving(ready=[1]) as peer:
        reader = TcpReader(peer.socket.fileno())
        into = bytearray(CHUNK)
        reader.submit_into(1, CHUNK, into)
        with pytest.raises(BufferError):
            into.clear()
        assert outcomes(reader, 1) == {1: "ok"}
        assert into == CONTENT[CHUNK : 2 * CHUNK]
        into.clear()
        with pytest.raises(ValueError, match="told where the bytes go"):
            reader.submit(2, 0, CHUNK)
        with pytest.raises(BufferError):
            reader.submit_into(2, 0, b"read-only")
        with pytest.raises(ValueError, match="a request is for 1 to"):
            reader.submit_into(2, 0, bytearray())


def test_a_connection_goes_on_with_another_reader_and_another_server() -> None:
    ours, theirs = tcp_pair()
    ours.settimeout(PATIENCE_S)
    with ours, theirs:
        for number in range(2):
            reader = TcpReader(ours.fileno(), region())
            reader.submit(number, 0, CHUNK)
            with serving(pair=(ours.dup(), theirs.dup()), idle_s=0.0) as peer:
                assert outcomes(reader, 1) == {number: "ok"}
                assert peer.ended() == "idle"
            reader.release()
            assert reader.poll(0.0) == []
            with pytest.raises(NativeError, match="was released"):
                reader.submit(2, 0, CHUNK)
        theirs.sendall(b"still there")
        assert ours.recv(11) == b"still there"


# ── ends ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_reader_that_is_gone_ends_the_run() -> None:
    with serving() as peer:
        peer.socket.close()
        assert peer.ended() == "closed"


def test_a_grant_that_ends_ends_the_run_and_the_reader_hears_of_it() -> None:
    with serving(ready=[], until_unix_ms=int(time.time() * 1000) + 50) as peer:
        reader = TcpReader(peer.socket.fileno(), region())
        reader.submit(1, 0, CHUNK, PATIENCE_S)
        assert outcomes(reader, 1) == {1: "failed"}
        assert reader.error == "it closed the connection"
        assert peer.ended() == "expired"
    with serving(until_unix_ms=0) as peer:
        assert peer.ended() == "expired"


def test_a_server_stops_in_the_middle_of_a_body_that_nobody_takes() -> None:
    with serving() as peer:
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader = TcpReader(peer.socket.fileno(), region())
        for chunk in range(CHUNKS):
            reader.submit(chunk, chunk * CHUNK, CHUNK)
        assert until(lambda: peer.server.sent_bytes > 0)
        peer.server.stop()
        assert peer.ended() == "stopped"
        with pytest.raises(NativeError, match="a connection is served once"):
            peer.server.run(LATER_MS)


def test_a_cancel_ends_a_poll_at_once_and_nothing_is_written_afterwards() -> None:
    with serving(ready=[]) as peer:
        filled = region(content=b"\xee" * SIZE)
        reader = TcpReader(peer.socket.fileno(), filled)
        reader.submit(1, 0, CHUNK, PATIENCE_S)
        thread = threading.Timer(0.02, reader.cancel)
        thread.start()
        began = time.monotonic()
        assert outcomes(reader, 1) == {1: "failed"}
        assert time.monotonic() - began < PATIENCE_S / 2
        assert reader.error == "it was cancelled"
        peer.control.mark_ready(0)
        assert peer.ended() == "closed"
        assert reader.poll(0.0) == []
        assert content_of(filled, 0, CHUNK) == b"\xee" * CHUNK
        with pytest.raises(NativeError, match="cancelled"):
            reader.submit(2, 0, CHUNK)
        thread.join()


def test_what_a_reader_may_not_ask_for_is_said_before_it_is_sent() -> None:
    with serving(ready=[]) as peer:
        reader = TcpReader(peer.socket.fileno(), region())
        for offset, size_bytes in [(SLAB - 1, 2), (SIZE, 1), (2**63, 1), (2**64 - 1, 2)]:
            with pytest.raises(IndexError):
                reader.submit(1, offset, size_bytes)
        with pytest.raises(ValueError, match="a request is for 1 to"):
            reader.submit(1, 0, 0)
        with pytest.raises(ValueError, match="600 s at most"):
            reader.submit(1, 0, 1, 601)
        for number in range(64):
            reader.submit(number, number, 1, PATIENCE_S)
        with pytest.raises(ValueError, match="request 3 is outstanding already"):
            reader.submit(3, 0, 1)
        with pytest.raises(NativeError, match="64 requests are outstanding"):
            reader.submit(64, 0, 1)
        peer.control.mark_ready(0)
        assert set(outcomes(reader, 64).values()) == {"ok"}


def test_only_the_owner_receives_and_only_streams_are_taken() -> None:
    held = region()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs, pytest.raises(OSError, match="not connected"):
        TcpReader(ours.fileno(), held)
    with socket.socket() as alone, pytest.raises(OSError, match="not connected"):
        TcpReader(alone.fileno(), held)
    with pytest.raises(OSError, match="Bad file descriptor"):
        TcpReader(-1, held)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(ValueError, match="only the owner"):
            TcpReader(ours.fileno(), attached(held))
        with pytest.raises(ValueError, match="stall_s"):
            TcpReader(ours.fileno(), held, 0.0)


def test_descriptors_go_with_their_ends() -> None:
    before = open_descriptors()
    with serving() as peer:
        reader = TcpReader(peer.socket.fileno(), region())
        reader.submit(1, 0, CHUNK)
        assert outcomes(reader, 1) == {1: "ok"}
    del reader, peer
    assert until(lambda: open_descriptors() == before)
