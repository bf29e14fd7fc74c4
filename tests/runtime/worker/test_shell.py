"""A worker that is a shell, driven as the controller drives it; also where the kernel gives it less."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from fleetstart.runtime.contract.node import exit_codes
from fleetstart.runtime.contract.node.messages import Drained, Usage
from fleetstart.runtime.contract.node.shell import STDERR, STDOUT, EndOfInput, Exit, Size, Start, read_exit
from fleetstart.runtime.contract.worker_headers import TOKEN_HEADER
from tests.runtime.workers import DEADLINE_S, TOKEN, ForkServerProcess, Functions, Worker, alive, until

HELLO = "def f(): return 1"


def shell(functions: Functions) -> Worker:
    worker = functions.assigned(HELLO, shell=True, concurrency=2)
    worker.ready()
    return worker


@contextmanager
def connected(worker: Worker, token: str = TOKEN) -> Iterator[ClientConnection]:
    url = worker.url.replace("http", "ws")
    with connect(url, additional_headers={TOKEN_HEADER: token}, proxy=None, open_timeout=DEADLINE_S) as socket:
        yield socket


def say(socket: ClientConnection, message: msgspec.Struct) -> None:
    socket.send(msgspec.json.encode(message).decode())


def heard(socket: ClientConnection) -> tuple[bytes, bytes, Exit]:
    """All that is printed until the end."""
    printed = {STDOUT: b"", STDERR: b""}
    while isinstance(frame := socket.recv(DEADLINE_S), bytes):
        printed[frame[:1]] += frame[1:]
    return printed[STDOUT], printed[STDERR], read_exit(frame)


def until_seen(socket: ClientConnection, wanted: bytes) -> bytes:
    """All that is printed until then."""
    seen = b""
    while wanted not in seen:
        frame = socket.recv(DEADLINE_S)
        assert isinstance(frame, bytes), frame
        seen += frame[1:]
    return seen


def ends_well(worker: Worker) -> None:
    while isinstance(message := worker.receive(), Usage):
        pass
    assert isinstance(message, Drained)
    assert worker.exit_status() == exit_codes.DRAINED


def test_one_command_and_then_the_end(functions: Functions) -> None:
    worker = shell(functions)
    with connected(worker) as socket:
        say(socket, Start(argv=["sh", "-c", "wc -c; echo no >&2; pwd; exit 9"]))
        for _ in range(50):
            socket.send(b"x" * 10_000)
        say(socket, EndOfInput())
        assert heard(socket) == (b"500000\n/tmp/function\n", b"no\n", Exit(9))
    ends_well(worker)


@pytest.mark.parametrize(
    ("command", "printed", "status"),
    [
        (["sh", "-c", "kill -TERM $$"], b"", 143),
        (["sh", "-c", "sleep 1000 & echo begun"], b"begun\n", 0),
        (["no-such-program"], b"", 127),
        (["/etc/passwd"], b"", 126),
        (["sh", "-c", "exit 300"], b"", 300 % 256),
        (["a\0b"], b"", 126),
    ],
)
def test_how_it_ended_is_told_as_a_shell_tells_it(
    functions: Functions, command: list[str], printed: bytes, status: int
) -> None:
    worker = shell(functions)
    with connected(worker) as socket:
        say(socket, Start(argv=command))
        out, err, end = heard(socket)
    assert (out, end) == (printed, Exit(status))
    assert bool(err) == (status in (126, 127))
    ends_well(worker)


def test_a_terminal_is_alone_in_its_namespace(functions: Functions) -> None:
    worker = shell(functions)
    with connected(worker) as socket:
        say(socket, Start(argv=["sh", "-c", "tty; stty size; ls -C /dev/pts; cat < /dev/tty"], window=Size(12, 34)))
        assert until_seen(socket, b"ptmx\r\n") == b"/dev/pts/0\r\n12 34\r\n0  ptmx\r\n"
        socket.send(b"typed\r")
        until_seen(socket, b"typed\r\ntyped\r\n")  # its echo, and what cat made of it
        socket.send(b"\x04")
        assert heard(socket) == (b"", b"", Exit(0))
    ends_well(worker)


def test_it_serves_nobody_else_and_ends_with_its_client(functions: Functions) -> None:
    worker = shell(functions)
    with pytest.raises(InvalidStatus) as refused, connected(worker, "another"):
        pass
    assert refused.value.response.status_code == 401
    assert worker.get().status_code == 500
    with connected(worker) as socket:
        say(socket, Start(argv=["sh", "-c", "trap '' HUP TERM; sleep 1000 & echo $$; sleep 1000"]))
        assert socket.recv(DEADLINE_S)
        with pytest.raises(InvalidStatus) as taken, connected(worker):
            pass
        assert taken.value.response.status_code == 403
    ends_well(worker)


def test_its_drain_ends_it(functions: Functions) -> None:
    worker = shell(functions)
    with connected(worker) as socket:
        say(socket, Start(argv=["sleep", "1000"]))
        worker.drain(0.1)
        with pytest.raises(ConnectionClosed):
            socket.recv(DEADLINE_S)
    ends_well(worker)


def test_a_plain_process_has_a_terminal_too_and_takes_its_command_with_it(
    plain_server: ForkServerProcess, tmp_path: Path
) -> None:
    worker = shell(Functions(plain_server, tmp_path))
    with connected(worker) as socket:
        say(socket, Start(argv=["sh", "-c", "echo $$; stty size; exec sleep 1000"], window=Size(12, 34)))
        pid = int(until_seen(socket, b"12 34").split()[0])
    ends_well(worker)
    until(lambda: not alive(pid), "end of the command")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_an_ordinary_user_gets_a_terminal() -> None:
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        server = ForkServerProcess(through=nobody)
        try:
            if not server.warm.isolation:
                pytest.skip(f"this machine refuses user namespaces: {server.warm.refused}")
            worker = shell(Functions(server, Path(name)))
            with connected(worker) as socket:
                say(socket, Start(argv=["sh", "-c", "tty; id -u; exit 4"], window=Size(12, 34)))
                assert heard(socket) == (b"/dev/pts/0\r\n65534\r\n", b"", Exit(4))
            ends_well(worker)
        finally:
            server.close()
