"""Hostile ends of a peer's connection: each gives a clear error, and no byte outside of what was asked for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.native import Region, TcpReader
from fleetstart.runtime.contract.node.peer_frames import (
    ANSWER_BYTES,
    MAX_OUTSTANDING,
    MAX_REQUEST_BYTES,
    REQUEST_BYTES,
    AnswerHeader,
    ReadRequest,
    Received,
    decode_answer,
    decode_request,
)
from tests.native.neighbours import PATIENCE_S
from tests.native.transport.peers import CHUNK, CHUNKS, CONTENT, SIZE, outcomes, region, serving, tcp_pair, whole

BEFORE = b"\xee" * SIZE


@pytest.fixture
def filled() -> Region:
    return region(content=BEFORE)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = tcp_pair()
    with ours, theirs:
        yield ours, theirs


def received(sock: socket.socket, size_bytes: int) -> bytes:
    sock.settimeout(PATIENCE_S)
    found = b""
    while len(found) < size_bytes and (more := sock.recv(size_bytes - len(found))):
        found += more
    return found


# ── both sides have the same frames ────────────────────────────────────────────────────────────────


def test_a_reader_sends_the_frames_that_python_reads(pair: tuple[socket.socket, socket.socket], filled: Region) -> None:
    ours, theirs = pair
    reader = TcpReader(ours.fileno(), filled)
    reader.submit(2**64 - 1, 3 * CHUNK + 5, 7, 1.5)
    asked = decode_request(received(theirs, REQUEST_BYTES))
    assert asked == ReadRequest(request=2**64 - 1, offset=3 * CHUNK + 5, size_bytes=7, wait_ms=1500)
    theirs.sendall(AnswerHeader(request=2**64 - 1, status="ok", size_bytes=7).encode() + b"seven!!")
    assert outcomes(reader, 1) == {2**64 - 1: "ok"}
    assert decode_request(received(theirs, REQUEST_BYTES)) == Received()
    for status in ("not_ready", "gone", "refused"):
        reader.submit(1, 0, 1)
        reader.submit(2, 1, 1)
        frames = [decode_request(received(theirs, REQUEST_BYTES)) for _ in range(2)]
        assert frames == [
            ReadRequest(request=number, offset=number - 1, size_bytes=1, outstanding=number - 1) for number in (1, 2)
        ]
        theirs.sendall(
            AnswerHeader(request=2, status=status).encode() + AnswerHeader(request=1, status=status).encode()
        )
        assert outcomes(reader, 2) == {1: status, 2: status}
        assert decode_request(received(theirs, REQUEST_BYTES)) == Received()
    expected = bytearray(BEFORE)
    expected[3 * CHUNK + 5 : 3 * CHUNK + 12] = b"seven!!"
    assert whole(filled) == expected


def test_a_server_understands_the_frames_that_python_sends() -> None:
    with serving(ready=[0], allowed=[(0, 2)]) as peer:
        ours = peer.socket.dup()
        with ours:
            for number, (offset, wait_ms, status) in enumerate(
                [(1, 0, "ok"), (CHUNK, 1, "not_ready"), (SIZE, 0, "refused")]
            ):
                ours.sendall(ReadRequest(request=number, offset=offset, size_bytes=9, wait_ms=wait_ms).encode())
                answer = decode_answer(received(ours, ANSWER_BYTES))
                assert (answer.request, answer.status) == (number, status)
                assert received(ours, answer.size_bytes) == CONTENT[offset : offset + answer.size_bytes]
            ours.sendall(Received().encode())
            peer.control.fail("store_error", "gone")
            ours.sendall(ReadRequest(request=9, offset=CHUNK, size_bytes=1).encode())
            assert decode_answer(received(ours, ANSWER_BYTES)).status == "gone"
            ours.sendall(Received(leaves=True).encode() + b"hello")
            assert peer.ended() == "left"


# ── a hostile holder ───────────────────────────────────────────────────────────────────────────────

OK = AnswerHeader(request=1, status="ok", size_bytes=CHUNK).encode()


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it sent no answer of version 1"),
        (OK[:4] + b"\x02" + OK[5:], "it sent no answer of version 1"),
        (OK[:6] + b"\x07" + OK[7:], "its answer to request 1 has the status 7"),
        (
            AnswerHeader(request=2, status="ok", size_bytes=CHUNK).encode(),
            "its answer to request 2, which is not outstanding",
        ),
        (AnswerHeader(request=1, status="ok", size_bytes=CHUNK + 1).encode(), "has 65537 bytes, expected are 65536"),
        (AnswerHeader(request=1, status="ok", size_bytes=1).encode(), "has 1 bytes, expected are 65536"),
        (AnswerHeader(request=1, status="ok", size_bytes=2**64 - 1).encode(), "expected are 65536"),
        (AnswerHeader(request=1, status="gone", size_bytes=5).encode(), "has 5 bytes, expected are 0"),
        (b"", "it closed the connection"),
        (OK[:11], "it closed the connection"),
        (OK + b"x" * 100, "it closed the connection after 100 of 65536 bytes of request 1"),
    ],
)
def test_a_wrong_answer_fails_the_connection_and_says_why(
    pair: tuple[socket.socket, socket.socket], filled: Region, sent: bytes, error: str
) -> None:
    ours, theirs = pair
    reader = TcpReader(ours.fileno(), filled)
    reader.submit(1, CHUNK, CHUNK)
    theirs.sendall(sent)
    theirs.shutdown(socket.SHUT_WR)
    assert outcomes(reader, 1) == {1: "failed"}
    assert reader.error is not None
    assert error in reader.error
    assert whole(filled)[:CHUNK] + whole(filled)[2 * CHUNK :] == BEFORE[: SIZE - CHUNK]
    with pytest.raises(Exception, match="the connection to the peer has failed"):
        reader.submit(2, 0, 1)
    with pytest.raises(Exception, match="the connection to the peer has failed"):
        reader.release()


def test_an_answer_that_comes_twice_is_not_taken(pair: tuple[socket.socket, socket.socket], filled: Region) -> None:
    ours, theirs = pair
    reader = TcpReader(ours.fileno(), filled)
    reader.submit(1, 0, CHUNK)
    reader.submit(2, CHUNK, CHUNK)
    theirs.sendall((OK + b"a" * CHUNK) * 2)
    assert outcomes(reader, 2) == {1: "ok", 2: "failed"}
    assert reader.error == "its answer to request 1, which is not outstanding"
    assert whole(filled) == b"a" * CHUNK + BEFORE[CHUNK:]


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_whatever_a_holder_sends_stays_inside_the_range_that_was_asked_for(sent: bytes, after_a_header: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        filled = region(content=BEFORE)
        reader = TcpReader(ours.fileno(), filled)
        reader.submit(1, CHUNK, 50)
        theirs.sendall((AnswerHeader(request=1, status="ok", size_bytes=50).encode() if after_a_header else b"") + sent)
        theirs.close()
        assert set(outcomes(reader, 1).values()) <= {"ok", "failed"}
        reader.poll(0.0)
        assert reader.error is not None
        found = whole(filled)
        assert found[:CHUNK] + found[CHUNK + 50 :] == BEFORE[50:]


STALL_S = 0.2


def test_silence_and_drip_end_with_the_reader_s_own_deadline(filled: Region) -> None:
    for begin in (b"", OK, OK[:5]):
        ours, theirs = tcp_pair()
        with ours, theirs:
            reader = TcpReader(ours.fileno(), filled, STALL_S)
            reader.submit(1, 0, CHUNK)
            theirs.sendall(begin)
            ended = threading.Event()

            def drip(sock: socket.socket = theirs, ended: threading.Event = ended) -> None:
                while not ended.wait(0.02):
                    sock.send(b"x")

            thread = threading.Thread(target=drip, daemon=True)
            if begin == OK:
                thread.start()
            assert outcomes(reader, 1) == {1: "failed"}
            assert reader.error == "it brought nothing for 0.2 s, or next to nothing"
            ended.set()
            if begin == OK:
                thread.join()


def test_a_chunk_that_is_waited_for_is_no_silence() -> None:
    with serving(ready=[]) as peer:
        reader = TcpReader(peer.socket.fileno(), region(), STALL_S)
        reader.submit(1, 0, CHUNK, PATIENCE_S)
        assert reader.poll(2 * STALL_S) == []
        assert reader.error is None


# ── a hostile reader ───────────────────────────────────────────────────────────────────────────────


def asked(outstanding: int) -> bytes:
    return ReadRequest(request=1, offset=CHUNK, size_bytes=CHUNK, wait_ms=600_000, outstanding=outstanding).encode()


ASK = asked(0)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"GET / HTTP/1.1\r\nHost: peer\r\nAccept: everything\r\n\r\n", "no request of version 1"),
        (ASK[:4] + b"\x02" + ASK[5:], "no request of version 1"),
        (ASK[:6] + b"\x09" + ASK[7:], "kind 9"),
        (ReadRequest(request=1, offset=0, size_bytes=0).encode(), "0 bytes"),
        (ReadRequest(request=1, offset=0, size_bytes=MAX_REQUEST_BYTES + 1).encode(), "67108865 bytes"),
        (ReadRequest(request=1, offset=0, size_bytes=1, wait_ms=600_001).encode(), "a wait of 600001 ms"),
        (asked(1), "has 1 requests outstanding, it says; 0 wait"),
        (ASK * 2, "has 0 requests outstanding, it says; 1 wait"),
        (b"".join(map(asked, range(MAX_OUTSTANDING + 1))), "one more than the 64 that may be outstanding"),
        (ASK + Received(outstanding=1, leaves=True).encode(), "kind 3"),
    ],
)
def test_a_wrong_request_ends_the_run_with_an_error(sent: bytes, error: str) -> None:
    with serving(ready=[]) as peer, peer.socket.dup() as ours:
        ours.sendall(sent)
        assert error in str(peer.ended())
        assert received(ours, 1) == b""


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(1, MAX_REQUEST_BYTES), st.integers(0, CHUNKS - 1))
def test_no_byte_of_a_chunk_that_was_not_granted_is_sent(offset: int, size_bytes: int, granted: int) -> None:
    with serving(allowed=[(granted, granted + 1)]) as peer, peer.socket.dup() as ours:
        ours.sendall(ReadRequest(request=1, offset=offset, size_bytes=size_bytes).encode())
        inside = granted * CHUNK <= offset and offset + size_bytes <= (granted + 1) * CHUNK
        assert decode_answer(received(ours, ANSWER_BYTES)).status == ("ok" if inside else "refused")


def test_a_reader_that_takes_nothing_ends_the_run() -> None:
    with serving(stall_s=STALL_S) as peer, peer.socket.dup() as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for number in range(CHUNKS):
            ours.sendall(ReadRequest(request=number, offset=0, size_bytes=SIZE, outstanding=number).encode())
        ended = peer.ended()
        assert isinstance(ended, TimeoutError | OSError)
