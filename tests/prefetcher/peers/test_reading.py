"""Reading from a peer's memory: the right bytes to those who may, in plain and encrypted, and a refusal to others."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetstart.prefetcher.peers import reader, server, session
from fleetstart.prefetcher.peers.connections import PeerConnections
from fleetstart.prefetcher.sources.errors import ReadCancelled, SourceError, SourceLost
from fleetstart.runtime.contract.identity import client_context, node_host, server_context
from fleetstart.runtime.contract.ids import CheckpointId, NodeId
from tests.prefetcher.nodes import Store
from tests.prefetcher.peers.holders import HOLDER, READER, Holder, Reading, holder_of, no_certificate
from tests.prefetcher.stages import Gated, Model
from tests.servers import wait_until
from tests.tls.identities import JOIN, NOW, authority, node_identity

AUTHORITY = authority()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def model(store: Store) -> Model:
    return Model(store)


@pytest.fixture
def holder(model: Model, store: Store) -> Iterator[Holder]:
    holder = holder_of(model, store.folder)
    yield holder
    holder.close()


@pytest.fixture
def encrypted(model: Model, store: Store) -> Iterator[Holder]:
    context = server_context(node_identity(AUTHORITY, HOLDER))
    holder = holder_of(model, store.folder, context=lambda: context, host=node_host(HOLDER, JOIN))
    yield holder
    holder.close()


def connections_of(node: str) -> PeerConnections:
    context = client_context(node_identity(AUTHORITY, node))
    return PeerConnections(lambda: context)


def test_chunks_come_from_another_node_s_memory(holder: Holder, model: Model) -> None:
    reading = Reading(model)
    assert reading.read(holder.peer(model.checkpoint)) == model.manifest.chunks
    assert reading.is_right
    wait_until(lambda: holder.server.sent_bytes == {READER: len(model.data)}, what="bytes counted")
    wait_until(lambda: not holder.pins(model.checkpoint), what="the pin taken back with the connection")
    assert holder.key_reads == 1


def test_chunks_come_over_tls(encrypted: Holder, model: Model) -> None:
    reading = Reading(model)
    connections = connections_of(READER)
    assert reading.read(encrypted.peer(model.checkpoint), connections) == model.manifest.chunks
    assert reading.is_right
    connections.close()


def test_a_connection_is_kept_for_the_next_fetch_and_another_checkpoint(
    holder: Holder, model: Model, store: Store
) -> None:
    other = Model(store, layers=2)
    holder.hold(other.checkpoint)
    connections = PeerConnections(no_certificate)
    for one in (model, other, model):
        reading = Reading(one, 4)
        assert reading.read(holder.peer(one.checkpoint), connections) == one.manifest.chunks[:4]
        assert reading.is_right
        assert holder.server.sessions == 1
    connections.close()
    wait_until(lambda: holder.server.sessions == 0, what="the end of the connection")


def test_a_kept_connection_that_the_holder_closed_is_made_anew(
    holder: Holder, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "IDLE_S", 0.0)
    connections, peer = PeerConnections(no_certificate), holder.peer(model.checkpoint)
    assert Reading(model, 2).read(peer, connections)
    wait_until(lambda: holder.server.sessions == 0, what="the end of the idle connection")
    assert Reading(model, 2).read(peer, connections)
    connections.close()


def test_an_idle_connection_holds_no_memory(holder: Holder, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "PIN_S", 0.0)
    connections, peer = PeerConnections(no_certificate), holder.peer(model.checkpoint)
    assert Reading(model, 2).read(peer, connections)
    wait_until(lambda: not holder.pins(model.checkpoint), what="no pin")
    assert holder.server.sessions == 1
    reading = Reading(model)
    assert reading.read(peer, connections) == model.manifest.chunks, "it is pinned again"
    assert reading.is_right
    connections.close()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"holder": NodeId("another")}, "wrong_holder"),
        ({"epoch": "e-0"}, "wrong_holder"),
        ({"life_s": -1.0}, "expired"),
        ({"key": bytes(32)}, "wrong_proof"),
    ],
)
def test_who_may_not_read_is_told_why(holder: Holder, model: Model, fields: dict[str, object], why: str) -> None:
    with pytest.raises(SourceLost, match=why):
        Reading(model).read(holder.peer(model.checkpoint, **fields))  # type: ignore[arg-type]
    assert not holder.server.sent_bytes
    assert not holder.pins(model.checkpoint)


def test_a_checkpoint_that_is_not_there_is_refused(
    holder: Holder, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "APPEAR_S", 0.0)
    with pytest.raises(SourceLost, match="not_in_memory"):
        Reading(model).read(holder.peer(CheckpointId("0" * 64)))


def test_another_node_s_certificate_does_not_fit_the_grant(encrypted: Holder, model: Model) -> None:
    connections = connections_of("thief")
    with pytest.raises(SourceLost, match="wrong_reader"):
        Reading(model).read(encrypted.peer(model.checkpoint), connections)


def test_a_reader_talks_to_the_node_that_it_was_told(encrypted: Holder, model: Model) -> None:
    """Another node of the system took the holder's address."""
    encrypted.host = node_host("other", JOIN)
    with pytest.raises(SourceError, match=r"(?i)hostname mismatch"):
        Reading(model).read(encrypted.peer(model.checkpoint), connections_of(READER))


@pytest.mark.parametrize("stranger", ["no certificate", "another authority"])
def test_who_has_no_certificate_of_the_system_gets_nothing(encrypted: Holder, model: Model, stranger: str) -> None:
    if stranger == "no certificate":
        encrypted.host = ""
        connections = PeerConnections(no_certificate)
    else:
        other = authority(NOW)
        identity = node_identity(other, READER)
        context = client_context(
            type(identity)(certificate=identity.certificate, key=identity.key, authority=AUTHORITY.certificate)
        )
        connections = PeerConnections(lambda: context)
    with pytest.raises(SourceError):
        Reading(model).read(encrypted.peer(model.checkpoint), connections)
    assert not encrypted.server.sent_bytes


def test_a_new_key_is_read_once_it_is_needed(holder: Holder, model: Model) -> None:
    assert Reading(model, 1).read(holder.peer(model.checkpoint))
    holder.key = os.urandom(32)
    wait_until(lambda: _reads(holder, model), what="the new key")
    for _ in range(5):
        with pytest.raises(SourceLost):
            Reading(model, 1).read(holder.peer(model.checkpoint, key=bytes(32)))
    assert holder.key_reads <= 3, "forged grants do not make it read again and again"


def _reads(holder: Holder, model: Model) -> bool:
    try:
        return bool(Reading(model, 1).read(holder.peer(model.checkpoint)))
    except SourceLost:
        return False


@pytest.mark.parametrize("wait_s", [5.0, 0.05])
def test_a_chunk_on_its_way_is_waited_for(
    model: Model, store: Store, monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    """Also if the holder says again and again that it still waits."""
    monkeypatch.setattr(reader, "WAIT_S", wait_s)
    source = Gated(store.folder)
    source.gate.clear()
    holder = Holder(source)
    segment = holder.hold(model.checkpoint, whole=False)
    assert segment.state == "filling"
    reading = Reading(model)
    thread = threading.Thread(target=reading.read, args=(holder.peer(model.checkpoint),))
    thread.start()
    wait_until(lambda: holder.server.sessions == 1, what="a waiting reader")
    time.sleep(0.2)
    source.gate.set()
    thread.join(20)
    assert reading.is_right
    holder.close()


def test_a_reader_that_is_told_to_stop_stops_waiting(model: Model, store: Store) -> None:
    source = Gated(store.folder)
    source.gate.clear()
    holder = Holder(source)
    holder.hold(model.checkpoint, whole=False)
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(ReadCancelled):
        Reading(model).read(holder.peer(model.checkpoint), stopped=stop.is_set)
    source.gate.set()
    holder.close()


def test_a_failed_fetch_of_the_holder_ends_its_readers(model: Model, store: Store) -> None:
    source = Gated(store.folder)
    source.gate.clear()
    holder = Holder(source)
    segment = holder.hold(model.checkpoint, whole=False)
    reading = Reading(model)
    failures: list[Exception] = []

    def read() -> None:
        try:
            reading.read(holder.peer(model.checkpoint))
        except SourceError as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    wait_until(lambda: holder.server.sessions == 1, what="a waiting reader")
    assert segment.fetch is not None
    segment.fetch.close(5)
    source.gate.set()
    thread.join(20)
    assert "its own fetch of the checkpoint failed" in str(failures[0])
    holder.close()


def test_a_grant_ends_while_its_connection_is_open(holder: Holder, model: Model) -> None:
    connections, peer = PeerConnections(no_certificate), holder.peer(model.checkpoint, life_s=1.0)
    assert Reading(model, 1).read(peer, connections)
    wait_until(lambda: holder.server.sessions == 0, what="the end of the grant")
    with pytest.raises(SourceLost, match="expired"):
        Reading(model, 1).read(peer, connections)
    connections.close()


def test_the_node_s_end_is_its_readers(holder: Holder, model: Model) -> None:
    connections, peer = PeerConnections(no_certificate), holder.peer(model.checkpoint)
    assert Reading(model, 1).read(peer, connections)
    holder.server.close()
    assert holder.server.sessions == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("peer-server")]
    with pytest.raises(SourceError):
        Reading(model, 1).read(peer, connections)


def test_a_node_ends_while_a_reader_connects(holder: Holder, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a connection that has just been accepted is ended with the others."""
    start, starting, closed = threading.Thread.start, threading.Event(), threading.Event()

    def start_late(thread: threading.Thread) -> None:
        if thread.name.startswith("peer-server-"):
            starting.set()
            closed.wait(0.5)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    monkeypatch.setattr(server, "CLOSE_S", 0.1)
    host, _, port = holder.peer(model.checkpoint).address.rpartition(":")
    with socket.create_connection((host, int(port))):
        assert starting.wait(10)
        holder.server.close()
        closed.set()
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("peer-server")])
