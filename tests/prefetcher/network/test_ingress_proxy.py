"""The ingress proxy: connections to a worker are forwarded, and none is left waiting when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from fleetstart.prefetcher.concurrency.threads import IoThread
from fleetstart.prefetcher.network.ingress_proxy import NodeIngress
from tests.servers import wait_until

DEADLINE_S = 20
DESCRIPTORS = 8 * 12
"""Of which a node gives twelve connections' to all forwarders, and half of them to one."""


class ForwarderUnderTest:
    """An ingress forwarder, driven as the daemon drives it; `workers` are the ends passed to its worker."""

    def __init__(self, ingress: NodeIngress) -> None:
        self.workers: list[socket.socket] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.end = asyncio.run_coroutine_threadsafe(self._open(ingress, listener), self._loop).result(DEADLINE_S)

    async def _open(self, ingress: NodeIngress, listener: socket.socket) -> Callable[[], None]:
        return ingress.open(listener, 1, self.workers.append)

    def call(self) -> socket.socket:
        return socket.create_connection(self.address, DEADLINE_S)

    def called(self) -> tuple[socket.socket, socket.socket]:
        """A caller's end, and the worker's."""
        before, caller = len(self.workers), self.call()
        wait_until(lambda: len(self.workers) > before, what="a connection for the worker")
        self.workers[before].settimeout(DEADLINE_S)
        return caller, self.workers[before]

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for worker in self.workers:
            worker.close()


@pytest.fixture
def side() -> Iterator[IoThread]:
    side = IoThread()
    yield side
    side.close()


@pytest.fixture
def ingress(side: IoThread) -> NodeIngress:
    return NodeIngress(side, DESCRIPTORS)


@pytest.fixture
def forwarder(ingress: NodeIngress) -> Iterator[ForwarderUnderTest]:
    forwarder = ForwarderUnderTest(ingress)
    yield forwarder
    forwarder.close()


def is_left(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_bytes_go_both_ways_and_each_says_its_last_by_itself(forwarder: ForwarderUnderTest) -> None:
    caller, worker = forwarder.called()
    with caller:
        caller.sendall(b"question")
        assert worker.recv(100) == b"question"
        caller.shutdown(socket.SHUT_WR)
        assert worker.recv(100) == b""
        worker.sendall(b"answer")
        worker.close()
        assert caller.recv(100) == b"answer"
        assert caller.recv(100) == b""


def test_much_passes_while_nobody_reads_the_other_way(forwarder: ForwarderUnderTest) -> None:
    caller, worker = forwarder.called()
    data = bytes(range(256)) * 40_000
    sending = threading.Thread(target=lambda: caller.sendall(data))
    sending.start()
    got = b""
    while len(got) < len(data):
        got += worker.recv(1 << 20)
    sending.join()
    assert got == data
    caller.close()
    assert is_left(worker)


def test_a_worker_that_leaves_is_told_to_its_callers(forwarder: ForwarderUnderTest) -> None:
    caller, worker = forwarder.called()
    with caller:
        worker.close()
        assert is_left(caller)


def test_its_end_ends_every_connection(forwarder: ForwarderUnderTest) -> None:
    caller, worker = forwarder.called()
    with caller:
        forwarder.end()
        assert is_left(caller)
        assert is_left(worker)
        wait_until(lambda: _is_refused(forwarder), what="the end of the listening socket")


def test_who_comes_as_it_ends_is_not_left_waiting(forwarder: ForwarderUnderTest, side: IoThread) -> None:
    """Both fall into one turn of the loop: the end is asked for when the connection is there already."""
    gate, busy = threading.Event(), threading.Event()

    def keep_busy() -> None:
        busy.set()
        gate.wait(DEADLINE_S)

    forwarder.called()[0].close()
    side.call(keep_busy)
    assert busy.wait(DEADLINE_S)
    with forwarder.call() as caller:
        forwarder.end()
        gate.set()
        assert is_left(caller)


def test_the_end_of_the_side_loop_is_the_end_of_all(forwarder: ForwarderUnderTest, side: IoThread) -> None:
    caller, worker = forwarder.called()
    with caller:
        side.close()
        assert is_left(caller)
        assert is_left(worker)
        forwarder.end()


def test_too_many_callers_of_one_worker_are_turned_away_until_there_is_room(forwarder: ForwarderUnderTest) -> None:
    with contextlib.ExitStack() as callers:
        first, worker = forwarder.called()
        for _ in range(5):
            callers.enter_context(forwarder.called()[0])
        with forwarder.call() as caller:
            assert is_left(caller)
        first.close()
        assert is_left(worker)
        worker.close()
        wait_until(lambda: _is_taken(forwarder), what="room for one more")


def test_all_forwarders_together_take_no_more_than_their_node_can_bear(
    forwarder: ForwarderUnderTest, ingress: NodeIngress
) -> None:
    with contextlib.ExitStack() as opened:
        others = [ForwarderUnderTest(ingress) for _ in range(2)]
        for other in others:
            opened.callback(other.close)
        for one in (forwarder, others[0]):
            for _ in range(6):
                opened.enter_context(one.called()[0])
        with others[1].call() as caller:
            assert is_left(caller)
        forwarder.end()
        wait_until(lambda: _is_taken(others[1]), what="room for one more")


def _is_taken(forwarder: ForwarderUnderTest) -> bool:
    with forwarder.call() as caller:
        caller.settimeout(0.2)
        try:
            return caller.recv(1) != b""
        except TimeoutError:
            return True
        except ConnectionResetError:
            return False


def _is_refused(forwarder: ForwarderUnderTest) -> bool:
    try:
        forwarder.call().close()
    except ConnectionRefusedError:
        return True
    return False
