"""Sockets of a node in the hands of a worker's code: it can serve them, and do nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fleetstart.prefetcher.network.served_socket import listening_socket, only_serve
from tests.servers import free_port

SO_DETACH_FILTER = 27
REFUSED_S = 0.3
"""Until an attempt to connect counts as one without an answer; on loopback one comes in microseconds."""
_libc = ctypes.CDLL(None, use_errno=True)


def disconnect(sock: socket.socket) -> None:
    """Makes an unconnected socket of a connected one."""
    nowhere = ctypes.create_string_buffer(32)
    assert _libc.connect(sock.fileno(), nowhere, len(nowhere)) == 0, errno.errorcode[ctypes.get_errno()]


def reaches(sock: socket.socket, service: socket.socket) -> bool:
    """True if an unconnected socket can be connected to a service."""
    sock.settimeout(REFUSED_S)
    try:
        sock.connect(service.getsockname())
    except OSError:
        return False
    return True


@pytest.fixture(params=["127.0.0.1", "::1"])
def address(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def unfiltered(address: str) -> socket.socket:
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


@pytest.fixture
def service(address: str) -> Iterator[socket.socket]:
    """Something of the node's that its workers must not reach."""
    with unfiltered(address) as service:
        yield service


@pytest.fixture
def listener(address: str) -> Iterator[socket.socket]:
    with listening_socket(address, 16) as listener:
        yield listener


@pytest.fixture
def accepted(listener: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client's end of a connection, and the served one."""
    with contextlib.ExitStack() as opened:
        client = opened.enter_context(socket.create_connection(listener.getsockname()[:2]))
        yield client, opened.enter_context(listener.accept()[0])


def test_it_serves_as_any_other(accepted: tuple[socket.socket, socket.socket]) -> None:
    for sender, receiver in (accepted, accepted[::-1]):
        sender.sendall(bytes(range(256)) * 64)
        assert receiver.recv(256 * 64, socket.MSG_WAITALL) == bytes(range(256)) * 64
    accepted[0].shutdown(socket.SHUT_WR)
    assert accepted[1].recv(1) == b""


def test_without_the_filter_a_listening_socket_reaches_what_its_node_reaches(
    address: str, service: socket.socket
) -> None:
    with unfiltered(address) as plain:
        plain.shutdown(socket.SHUT_RD)
        assert reaches(plain, service)


def test_the_listening_socket_reaches_nothing(listener: socket.socket, service: socket.socket) -> None:
    listener.shutdown(socket.SHUT_RD)
    assert not reaches(listener, service)


def test_an_accepted_connection_reaches_nothing(
    accepted: tuple[socket.socket, socket.socket], service: socket.socket
) -> None:
    disconnect(accepted[1])
    assert not reaches(accepted[1], service)


def test_a_connection_that_the_node_opened_reaches_nothing_else(address: str, service: socket.socket) -> None:
    with (
        unfiltered(address) as peer,
        socket.create_connection(peer.getsockname()[:2]) as link,
        peer.accept()[0] as theirs,
    ):
        only_serve(link)
        link.sendall(b"there")
        theirs.sendall(b"and back")
        assert (theirs.recv(8), link.recv(8)) == (b"there", b"and back")
        disconnect(link)
        assert not reaches(link, service)


def test_it_cannot_stand_in_for_a_service_on_another_port(listener: socket.socket, address: str) -> None:
    port = free_port()
    listener.shutdown(socket.SHUT_RD)
    listener.bind((address, port))
    listener.listen()
    with pytest.raises(TimeoutError):
        socket.create_connection((address, port), timeout=REFUSED_S)


def test_nobody_takes_the_filter_off(accepted: tuple[socket.socket, socket.socket], listener: socket.socket) -> None:
    for sock in (listener, accepted[1]):
        with pytest.raises(PermissionError):
            sock.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def test_one_on_loopback_has_no_other_interface(
    accepted: tuple[socket.socket, socket.socket], listener: socket.socket
) -> None:
    for sock in (listener, accepted[1]):
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0") == b"lo"


UNPRIVILEGED = """
import encodings.idna, os, socket  # all that is imported is, before another user may not read it
from fleetstart.prefetcher.network.served_socket import listening_socket, why_unfiltered
if os.geteuid() == 0:
    os.seteuid(65534)  # the effective capabilities go with it
listener = listening_socket("127.0.0.1", 1)
with socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as served:
    served.sendall(b"there")
    print(client.recv(5).decode())
    print("locked", served.getsockopt(socket.SOL_SOCKET, 44))
print("refused" if why_unfiltered() else "filtered")
"""


def test_an_ordinary_user_s_sockets_serve_and_it_is_known_whether_they_have_a_filter() -> None:
    """Kernels differ: some let only root put one on."""
    done = subprocess.run([sys.executable, "-c", UNPRIVILEGED], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() in (["there", "locked", "1", "filtered"], ["there", "locked", "0", "refused"])
