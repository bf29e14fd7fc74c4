"""What a stage reads, allocates and starts for a connection that has not proved itself: next to nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
import tracemalloc

import msgspec
import pytest

from fleetstart.runtime.pipeline.frames import FORMAT, HEAD, MAGIC, Hello, Ping, StageLoaded, send_frame
from fleetstart.runtime.pipeline.links import HELLO_S, STRANGERS_MAX
from tests.runtime.pipeline.test_links import PIPELINE, End, two
from tests.servers import wait_until
from tests.stopwatch import Stopwatch

ROOM_BYTES = 1 << 20


PING = msgspec.msgpack.encode(Ping())


@pytest.mark.parametrize("sizes", [(len(PING), 256 << 20), (8 << 20, 0)], ids=["payload", "message"])
def test_a_stranger_allocates_nothing(sizes: tuple[int, int]) -> None:
    end = End(0)
    tracemalloc.start()
    try:
        with socket.create_connection(end.address) as stranger:
            stranger.sendall(HEAD.pack(MAGIC, FORMAT, *sizes) + PING)
            stranger.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", "refused by its head"
        assert tracemalloc.get_traced_memory()[1] < ROOM_BYTES
    finally:
        tracemalloc.stop()
        end.links.close()


def test_a_greeting_has_a_time_in_all_and_not_for_each_byte() -> None:
    end = End(0)
    hello = HEAD.pack(MAGIC, FORMAT, 4000, 0)
    watch = Stopwatch()
    with contextlib.closing(end.links), socket.create_connection(end.address) as slow:
        slow.sendall(hello)
        slow.settimeout(0.1)

        def closed() -> bool:
            try:
                slow.sendall(b"x")
                return slow.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_until(closed, HELLO_S + 5, what="the end of its time")
        assert watch.unhindered_s < 2 * HELLO_S


def test_strangers_are_few_and_keep_no_stage_out() -> None:
    before = threading.active_count()
    with two() as (first, second), contextlib.ExitStack() as strangers:
        assert first.links.wait(5)
        for _ in range(5 * STRANGERS_MAX):
            strangers.enter_context(socket.create_connection(first.address))
        wait_until(lambda: threading.active_count() <= before + 6 + STRANGERS_MAX, 5, what="threads")
        second.links.send(0, StageLoaded())
        wait_until(lambda: first.frames == [(1, StageLoaded(), b"")], 5, what="the stage's own frame")
    end = End(0)
    with contextlib.closing(end.links), contextlib.ExitStack() as strangers:
        for _ in range(2 * STRANGERS_MAX):
            strangers.enter_context(socket.create_connection(end.address))
        link = strangers.enter_context(socket.create_connection(end.address))
        send_frame(link, Hello(PIPELINE, 1, "word"))
        send_frame(link, StageLoaded())
        wait_until(lambda: end.frames == [(1, StageLoaded(), b"")], 5, what="a stage that came after them")


def test_a_frame_that_is_no_greeting_is_refused() -> None:
    end = End(0)
    with contextlib.closing(end.links), socket.create_connection(end.address) as stranger:
        send_frame(stranger, StageLoaded())
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        assert not end.frames
