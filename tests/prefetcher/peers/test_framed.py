"""One framing, twice written: each reader with each server, native or in Python, brings the same bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from fleetstart import native
from fleetstart.prefetcher.peers.framed import FramedCompletion, FramedReader, FramedServer
from fleetstart.prefetcher.peers.links import PlainLink
from fleetstart.runtime.contract.node.peer_frames import Received
from tests.native.transport.peers import CHUNK, CHUNKS, CONTENT, SIZE, SLAB, checksum, region, tcp_pair, whole
from tests.servers import wait_until

LIMIT_S = 20.0
READ_S = 5.0
Reader = native.TcpReader | FramedReader
KINDS = pytest.mark.parametrize("reads", ["native", "framed"])
SERVES = pytest.mark.parametrize("serves", ["native", "framed"])


def reader_of(kind: str, sock: socket.socket) -> Reader:
    return native.TcpReader(sock.fileno(), None, READ_S) if kind == "native" else FramedReader(PlainLink(sock), READ_S)


@contextmanager
def served(
    kind: str, control: native.ControlBlock, idle_s: float = LIMIT_S
) -> Iterator[tuple[socket.socket, list[str]]]:
    """The reader's end of a connection to a server of the whole content, and how that ended."""
    near, far = tcp_pair()
    held, ends = region(content=CONTENT), list[str]()
    until_unix_ms = int((time.time() + LIMIT_S) * 1000)

    def serve() -> None:
        server: native.TcpServer | FramedServer
        if kind == "native":
            server = native.TcpServer(far.fileno(), held, control, CHUNK, [(0, CHUNKS)], READ_S)
        else:
            server = FramedServer(PlainLink(far), held, control, slab_bytes=SLAB, chunk_bytes=CHUNK, stall_s=READ_S)
        try:
            ends.append(server.run(until_unix_ms, idle_s))
        except (native.NativeError, ValueError) as error:
            ends.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield near, ends
    finally:
        with contextlib.suppress(OSError):  # the server has ended it
            near.shutdown(socket.SHUT_RDWR)
        near.close()
        thread.join(LIMIT_S)
        far.close()


def control_of(ready: Sequence[int]) -> native.ControlBlock:
    control = native.ControlBlock.create("framed", CHUNKS, b"{}", 1)
    for chunk in ready:
        control.mark_ready(chunk)
    return control


def completed(reader: Reader, count: int) -> dict[int, native.Completion | FramedCompletion]:
    found: dict[int, native.Completion | FramedCompletion] = {}
    wait_until(
        lambda: len(found) == count or bool(found.update({c.request: c for c in reader.poll(0.1)})), what="answers"
    )
    return found


@KINDS
@SERVES
def test_every_range_comes_with_its_checksum_and_the_connection_is_left_whole(reads: str, serves: str) -> None:
    into = region()
    with served(serves, control_of(range(CHUNKS))) as (sock, ends):
        reader = reader_of(reads, sock)
        for chunk in range(CHUNKS):
            reader.submit_into(chunk, chunk * CHUNK, into.view(chunk * CHUNK, CHUNK), 1.0)
        found = completed(reader, CHUNKS)
        assert {one.status for one in found.values()} == {"ok"}
        assert {number: one.checksum for number, one in found.items()} == {
            chunk: checksum(CONTENT[chunk * CHUNK : (chunk + 1) * CHUNK]) for chunk in range(CHUNKS)
        }
        reader.release()
        sock.sendall(Received(leaves=True).encode())
        wait_until(lambda: bool(ends), what="the end")
        assert ends == ["left"]
    assert whole(into) == CONTENT


@KINDS
@SERVES
def test_what_is_ready_comes_first_the_rest_when_it_is_and_nothing_that_there_is_not(reads: str, serves: str) -> None:
    into, control = region(), control_of([2])
    with served(serves, control) as (sock, _):
        reader = reader_of(reads, sock)
        for number, (chunk, wait_s) in enumerate([(0, LIMIT_S), (1, 0.0), (2, LIMIT_S)]):
            reader.submit_into(number, chunk * CHUNK, into.view(chunk * CHUNK, CHUNK), wait_s)
        reader.submit_into(3, SIZE, into.view(0, 1), 0.0)
        found = completed(reader, 3)
        assert {number: one.status for number, one in found.items()} == {1: "not_ready", 2: "ok", 3: "refused"}
        control.mark_ready(0)
        assert completed(reader, 1)[0].status == "ok"
        reader.submit_into(4, 3 * CHUNK, into.view(0, CHUNK), LIMIT_S)
        control.fail("store_failed", "no store")
        assert completed(reader, 1)[4].status == "gone"


@SERVES
def test_a_server_of_which_nothing_is_asked_hands_its_connection_back(serves: str) -> None:
    with served(serves, control_of([]), idle_s=0.05) as (_, ends):
        wait_until(lambda: bool(ends), what="the end")
    assert ends == ["idle"]


@KINDS
def test_a_peer_that_says_nothing_is_given_up_by_its_wait_and_the_stall(
    reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = tcp_pair()
    monkeypatch.setattr("tests.prefetcher.peers.test_framed.READ_S", 0.2)
    with near, far:
        reader = reader_of(reads, near)
        reader.submit_into(0, 0, region().view(0, CHUNK), 0.1)
        assert gives_up(reader)


def gives_up(reader: Reader) -> bool:
    look: Callable[[], Sequence[native.Completion | FramedCompletion]] = lambda: reader.poll(0.1)  # noqa: E731
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        try:
            if any(one.status == "failed" for one in look()):
                return True
        except TimeoutError:
            return True
    return False
