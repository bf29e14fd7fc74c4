"""Readers that do not keep to the protocol: they get nothing, hold nothing up, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from fleetstart.prefetcher.peers import frames, server, session
from fleetstart.prefetcher.peers.connections import PeerConnections
from fleetstart.prefetcher.peers.frames import Hello
from fleetstart.prefetcher.peers.links import PlainLink
from fleetstart.prefetcher.sources.errors import SourceLost
from fleetstart.runtime.contract.node.peer_frames import (
    ANSWER_BYTES,
    REQUEST_BYTES,
    ReadRequest,
    Received,
    decode_answer,
)
from fleetstart.runtime.contract.node.peers import NONCE_BYTES, Peer, grant_proof
from tests.prefetcher.nodes import Store
from tests.prefetcher.peers.holders import Holder, Reading, holder_of, no_certificate
from tests.prefetcher.stages import Model
from tests.servers import wait_until

DEADLINE_S = 20


@pytest.fixture
def holder(model: Model, store: Store) -> Iterator[Holder]:
    holder = holder_of(model, store.folder)
    yield holder
    holder.close()


def stranger(holder: Holder) -> tuple[socket.socket, bytes]:
    """A connection, and the holder's nonce."""
    host, port = holder.address.split(":")
    sock = socket.create_connection((host, int(port)), DEADLINE_S)
    challenge = sock.recv(frames.CHALLENGE_BYTES, socket.MSG_WAITALL)
    assert challenge.startswith(frames.MAGIC)
    return sock, challenge[len(frames.MAGIC) :]


def hello_of(peer: Peer, holder_nonce: bytes) -> bytes:
    nonce = os.urandom(NONCE_BYTES)
    data = msgspec.json.encode(Hello(peer.grant, nonce, grant_proof(peer.secret, holder_nonce, nonce)))
    return frames.LENGTH.pack(len(data)) + data


def proved(holder: Holder, model: Model) -> socket.socket:
    sock, nonce = stranger(holder)
    sock.sendall(hello_of(holder.peer(model.checkpoint), nonce))
    assert frames.LENGTH.unpack(sock.recv(frames.LENGTH.size, socket.MSG_WAITALL)) == (0,)
    return sock


def refusal(sock: socket.socket) -> str:
    (size,) = frames.LENGTH.unpack(sock.recv(frames.LENGTH.size, socket.MSG_WAITALL))
    return sock.recv(size, socket.MSG_WAITALL).decode()


def speaks(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    """True for the server whose bytes native code moves; False for the one in Python, as inside TLS."""
    if not native:
        monkeypatch.setattr(PlainLink, "native_fd", lambda _: None)


def ends(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True


def is_unharmed(holder: Holder, model: Model) -> bool:
    """Somebody else reads, and nothing is held."""
    reading = Reading(model)
    assert reading.read(holder.peer(model.checkpoint)) == model.manifest.chunks
    wait_until(lambda: not holder.server.sessions and not holder.pins(model.checkpoint), what="nothing held")
    return reading.is_right


def test_a_proof_that_was_overheard_opens_no_other_connection(holder: Holder, model: Model) -> None:
    first, nonce = stranger(holder)
    said = hello_of(holder.peer(model.checkpoint), nonce)
    second, _ = stranger(holder)
    with first, second:
        second.sendall(said)
        assert refusal(second) == "wrong_proof"
        first.sendall(said)
        assert frames.LENGTH.unpack(first.recv(frames.LENGTH.size)) == (0,)
    assert is_unharmed(holder, model)


REQUESTS = {
    "no grant": ReadRequest(request=1, offset=0, size_bytes=1).encode(),
    "an empty grant": frames.LENGTH.pack(0),
    "a long grant": frames.LENGTH.pack(frames.HELLO_MAX_BYTES + 1),
    "no JSON": frames.LENGTH.pack(4) + b"\xff\xfe{]",
    "another protocol": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("name", REQUESTS)
def test_who_talks_otherwise_is_cut_off(holder: Holder, model: Model, name: str) -> None:
    sock, _ = stranger(holder)
    with sock:
        sock.sendall(REQUESTS[name])
        assert ends(sock)
    assert is_unharmed(holder, model)


@pytest.mark.parametrize("native", [True, False], ids=["native", "framed"])
@pytest.mark.parametrize(
    "frame",
    [bytes(REQUEST_BYTES), ReadRequest(request=1, offset=0, size_bytes=1, outstanding=7).encode()],
    ids=["no frame", "answers that were not given"],
)
def test_who_sends_other_frames_is_cut_off(
    holder: Holder, model: Model, monkeypatch: pytest.MonkeyPatch, frame: bytes, native: bool
) -> None:
    speaks(monkeypatch, native)
    with proved(holder, model) as sock:
        sock.sendall(frame)
        assert ends(sock)
    assert is_unharmed(holder, model)


@pytest.mark.parametrize("native", [True, False], ids=["native", "framed"])
@pytest.mark.parametrize("offset", [1 << 40, (1 << 64) - 2])
def test_there_is_no_other_memory_to_read(
    holder: Holder, model: Model, monkeypatch: pytest.MonkeyPatch, offset: int, native: bool
) -> None:
    speaks(monkeypatch, native)
    with proved(holder, model) as sock:
        sock.sendall(ReadRequest(request=7, offset=offset, size_bytes=2).encode())
        answer = decode_answer(sock.recv(ANSWER_BYTES, socket.MSG_WAITALL))
        assert (answer.request, answer.status, answer.size_bytes) == (7, "refused", 0)
    assert is_unharmed(holder, model)


def test_silence_and_single_bytes_have_seconds(holder: Holder, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "PROVE_S", 0.3)
    silent, nonce = stranger(holder)
    dripping, _ = stranger(holder)
    stop = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            for byte in hello_of(holder.peer(model.checkpoint), nonce):
                dripping.sendall(bytes([byte]))
                stop.wait(0.05)

    thread = threading.Thread(target=drip)
    thread.start()
    with silent, dripping:
        assert ends(silent)
        assert ends(dripping)
    stop.set()
    thread.join()
    assert is_unharmed(holder, model)


def test_strangers_are_few_and_keep_no_reader_out(
    holder: Holder, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STRANGERS_MAX", 4)
    with contextlib.ExitStack() as held:
        strangers = [held.enter_context(stranger(holder)[0]) for _ in range(8)]
        assert Reading(model).read(holder.peer(model.checkpoint)) == model.manifest.chunks
        for oldest in strangers[:4]:
            assert ends(oldest), "made room"


def test_one_reader_has_so_many_connections(holder: Holder, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READER_SESSIONS_MAX", 3)
    with contextlib.ExitStack() as held:
        for _ in range(3):
            held.enter_context(proved(holder, model))
        with pytest.raises(SourceLost, match="too_many"):
            Reading(model).read(holder.peer(model.checkpoint))
    wait_until(lambda: not holder.server.sessions, what="room again")
    connections = PeerConnections(no_certificate)
    assert Reading(model).read(holder.peer(model.checkpoint), connections)
    connections.close()


@pytest.mark.parametrize("native", [True, False], ids=["native", "framed"])
@pytest.mark.parametrize(
    "sent",
    [
        Received(outstanding=1, leaves=True).encode(),
        Received(leaves=True).encode() + ReadRequest(request=1, offset=0, size_bytes=1).encode(),
        Received(leaves=True).encode() + frames.LENGTH.pack(1 << 31),
    ],
    ids=["leaves with something outstanding", "reads without a grant", "an endless greeting"],
)
def test_nonsense_between_two_grants_ends_the_connection(
    holder: Holder, model: Model, monkeypatch: pytest.MonkeyPatch, sent: bytes, native: bool
) -> None:
    speaks(monkeypatch, native)
    with proved(holder, model) as sock:
        sock.sendall(sent)
        assert ends(sock)
    assert is_unharmed(holder, model)


@pytest.mark.parametrize("native", [True, False], ids=["native", "framed"])
def test_a_reader_that_takes_nothing_is_dropped_and_slows_nobody(
    holder: Holder, model: Model, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    speaks(monkeypatch, native)
    monkeypatch.setattr(session, "SEND_S", 0.3)
    with proved(holder, model) as sock:
        whole = model.manifest.chunk_bytes * len(model.manifest.chunks)
        for number in range(60):
            sock.sendall(ReadRequest(request=number, offset=0, size_bytes=whole, outstanding=number).encode())
        reading = Reading(model)
        assert reading.read(holder.peer(model.checkpoint)) == model.manifest.chunks
        assert reading.is_right
        wait_until(lambda: not holder.server.sessions, DEADLINE_S, what="the end of the one that takes nothing")
    assert is_unharmed(holder, model)
