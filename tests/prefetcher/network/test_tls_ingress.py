"""The TLS ingress: controllers reach a worker through it, and nobody else does or holds anything up."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest

from fleetstart.prefetcher.concurrency.threads import IoThread
from fleetstart.prefetcher.network import tls_ingress
from fleetstart.prefetcher.network.tls_ingress import STRANGERS_MAX, TlsIngress
from fleetstart.runtime.contract.identity import Identity, client_context, node_host, server_context
from tests.servers import wait_until
from tests.tls.identities import JOIN, NOW, authority, node_identity

AUTHORITY = authority()
CONTROLLER = AUTHORITY.controller_identity("gw-1", NOW)
DEADLINE_S = 20


class Worker:
    """A server without TLS, which echoes; and the ingress before it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.taken = 0
        threading.Thread(target=self._accept, daemon=True).start()
        self.io = IoThread()
        self.context = server_context(node_identity(AUTHORITY))
        self.address, self.end = TlsIngress(self.io, lambda: self.context).open(
            "127.0.0.1", self.listener.getsockname()
        )

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self.listener.accept()
                self.taken += 1
                threading.Thread(target=self._echo, args=(link,), daemon=True).start()

    def _echo(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            while data := link.recv(1 << 16):
                link.sendall(data)

    def plain(self) -> socket.socket:
        return socket.create_connection(self.address, DEADLINE_S)

    def call(self, identity: Identity = CONTROLLER, host: str = node_host("vm2", JOIN)) -> ssl.SSLSocket:
        return client_context(identity).wrap_socket(self.plain(), server_hostname=host)

    def close(self) -> None:
        self.end()
        self.io.close()
        self.listener.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def echoed(link: socket.socket, data: bytes) -> bytes:
    found = bytearray()
    for at in range(0, len(data), 1 << 16):  # in turns: one thread at a time may use a TLS connection
        piece = data[at : at + (1 << 16)]
        link.sendall(piece)
        while len(found) < at + len(piece) and (more := link.recv(1 << 16)):
            found += more
    return bytes(found)


def is_refused(link: ssl.SSLSocket) -> bool:
    """In TLS 1.3 a client learns that its certificate was refused with what it reads first."""
    try:
        link.sendall(b"hello")
        return link.recv(1) == b""
    except (ssl.SSLError, ConnectionError):
        return True


def test_bytes_go_through_both_ways(worker: Worker) -> None:
    with worker.call() as link:
        data = os.urandom(4_000_000)
        assert echoed(link, data) == data
        assert link.version() == "TLSv1.3"
    with worker.call() as one, worker.call() as other:
        assert (echoed(one, b"one"), echoed(other, b"other")) == (b"one", b"other")


@pytest.mark.parametrize(
    "identity",
    [
        node_identity(AUTHORITY, "vm3"),
        Identity(
            certificate=(other := authority().controller_identity("gw-1", NOW)).certificate,
            key=other.key,
            authority=AUTHORITY.certificate,
        ),
    ],
    ids=["another node", "another authority"],
)
def test_others_certificates_reach_no_worker(worker: Worker, identity: Identity) -> None:
    with worker.call(identity) as link:
        assert is_refused(link)
    assert not worker.taken


def test_nobody_gets_in_without_a_certificate(worker: Worker) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(worker.plain()) as link:
        assert is_refused(link)
    with worker.plain() as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while plain.recv(4096):
                pass
    assert not worker.taken


def test_a_silent_stranger_has_a_few_seconds(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_ingress, "HANDSHAKE_S", 0.2)
    with worker.plain() as silent:
        silent.settimeout(DEADLINE_S)
        with contextlib.suppress(ConnectionError):
            assert silent.recv(1) == b""


def test_strangers_are_few_and_keep_no_controller_out(worker: Worker) -> None:
    with contextlib.ExitStack() as held:
        strangers = [held.enter_context(worker.plain()) for _ in range(STRANGERS_MAX + 8)]
        with worker.call() as link:
            assert echoed(link, b"hello") == b"hello"
        for oldest in strangers[:8]:
            oldest.settimeout(DEADLINE_S)
            with contextlib.suppress(ConnectionError):
                assert oldest.recv(1) == b"", "made room"


def test_an_open_connection_outlives_the_renewal_of_the_certificate(worker: Worker) -> None:
    with worker.call() as before:
        assert echoed(before, b"one") == b"one"
        first = before.getpeercert(binary_form=True)
        worker.context = server_context(node_identity(AUTHORITY))
        with worker.call() as after:
            assert echoed(after, b"two") == b"two"
            assert after.getpeercert(binary_form=True) != first
        assert echoed(before, b"three") == b"three"


def test_who_does_not_read_is_not_read_from(worker: Worker) -> None:
    """What a slow reader leaves is held back at its sender, and not in the node's memory."""
    with worker.call() as link:
        link.settimeout(0.5)
        sent = 0
        with contextlib.suppress(TimeoutError, ssl.SSLError):
            while sent < 200 << 20:
                link.sendall(bytes(1 << 20))
                sent += 1 << 20
        assert sent < 64 << 20


def test_the_worker_s_end_closes_its_connections(worker: Worker) -> None:
    with worker.call() as link:
        assert echoed(link, b"hello") == b"hello"
        worker.end()
        assert is_refused(link)
        wait_until(lambda: _refuses(worker), what="no listener")


def _refuses(worker: Worker) -> bool:
    try:
        worker.plain().close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_worker_that_is_gone_ends_the_call(worker: Worker) -> None:
    worker.listener.shutdown(socket.SHUT_RDWR)
    worker.listener.close()
    with worker.call() as link:
        assert is_refused(link)
