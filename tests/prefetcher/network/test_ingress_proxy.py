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
"""Of which a node gives twelve connections' to all doorways, and half of them to one."""


class ForwarderUnderTest:
    """An ingress forwarder, driven as the daemon drives it; `workers` are the ends passed to its worker."""

    def __init__(self, doorways: NodeIngress) -> None:
        self.workers: list[socket.socket] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.end = asyncio.run_coroutine_threadsafe(self._open(doorways, listener), self._loop).result(DEADLINE_S)

    async def _open(self, doorways: NodeIngress, listener: socket.socket) -> Callable[[], None]:
        return doorways.open(listener, 1, self.workers.append)

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
def doorways(side: IoThread) -> NodeIngress:
    return NodeIngress(side, DESCRIPTORS)


@pytest.fixture
def entrance(doorways: NodeIngress) -> Iterator[ForwarderUnderTest]:
    entrance = ForwarderUnderTest(doorways)
    yield entrance
    entrance.close()


def is_left(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_bytes_go_both_ways_and_each_says_its_last_by_itself(entrance: ForwarderUnderTest) -> None:
    caller, worker = entrance.called()
    with caller:
        caller.sendall(b"question")
        assert worker.recv(100) == b"question"
        caller.shutdown(socket.SHUT_WR)
        assert worker.recv(100) == b""
        worker.sendall(b"answer")
        worker.close()
        assert caller.recv(100) == b"answer"
        assert caller.recv(100) == b""


def test_much_passes_while_nobody_reads_the_other_way(entrance: ForwarderUnderTest) -> None:
    caller, worker = entrance.called()
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


def test_a_worker_that_leaves_is_told_to_its_callers(entrance: ForwarderUnderTest) -> None:
    caller, worker = entrance.called()
    with caller:
        worker.close()
        assert is_left(caller)


def test_its_end_ends_every_connection(entrance: ForwarderUnderTest) -> None:
    caller, worker = entrance.called()
    with caller:
        entrance.end()
        assert is_left(caller)
        assert is_left(worker)
        wait_until(lambda: _is_refused(entrance), what="the end of the listening socket")


def test_who_comes_as_it_ends_is_not_left_waiting(entrance: ForwarderUnderTest, side: IoThread) -> None:
    """Both fall into one turn of the loop: the end is asked for when the connection is there already."""
    gate, busy = threading.Event(), threading.Event()

    def keep_busy() -> None:
        busy.set()
        gate.wait(DEADLINE_S)

    entrance.called()[0].close()
    side.call(keep_busy)
    assert busy.wait(DEADLINE_S)
    with entrance.call() as caller:
        entrance.end()
        gate.set()
        assert is_left(caller)


def test_the_end_of_the_side_loop_is_the_end_of_all(entrance: ForwarderUnderTest, side: IoThread) -> None:
    caller, worker = entrance.called()
    with caller:
        side.close()
        assert is_left(caller)
        assert is_left(worker)
        entrance.end()


def test_too_many_callers_of_one_worker_are_turned_away_until_there_is_room(entrance: ForwarderUnderTest) -> None:
    with contextlib.ExitStack() as callers:
        first, worker = entrance.called()
        for _ in range(5):
            callers.enter_context(entrance.called()[0])
        with entrance.call() as caller:
            assert is_left(caller)
        first.close()
        assert is_left(worker)
        worker.close()
        wait_until(lambda: _is_taken(entrance), what="room for one more")


def test_all_doorways_together_take_no_more_than_their_node_can_bear(
    entrance: ForwarderUnderTest, doorways: NodeIngress
) -> None:
    with contextlib.ExitStack() as opened:
        others = [ForwarderUnderTest(doorways) for _ in range(2)]
        for other in others:
            opened.callback(other.close)
        for one in (entrance, others[0]):
            for _ in range(6):
                opened.enter_context(one.called()[0])
        with others[1].call() as caller:
            assert is_left(caller)
        entrance.end()
        wait_until(lambda: _is_taken(others[1]), what="room for one more")


def _is_taken(entrance: ForwarderUnderTest) -> bool:
    with entrance.call() as caller:
        caller.settimeout(0.2)
        try:
            return caller.recv(1) != b""
        except TimeoutError:
            return True
        except ConnectionResetError:
            return False


def _is_refused(entrance: ForwarderUnderTest) -> bool:
    try:
        entrance.call().close()
    except ConnectionRefusedError:
        return True
    return False
