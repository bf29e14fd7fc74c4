"""Links between stages: who may use them, what breaks them, and how soon the others know."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from fleetstart.runtime.contract.ids import PipelineId
from fleetstart.runtime.contract.weights.stage import Stage
from fleetstart.runtime.pipeline.frames import (
    FORMAT,
    HEAD,
    MAGIC,
    Hello,
    LinkBroken,
    Message,
    Ping,
    StageLoaded,
    StepResult,
    receive_frame,
    send_frame,
)
from fleetstart.runtime.pipeline.links import RELAYED_FACTOR, SILENCE_S, StageLinks
from tests.servers import wait_until

PIPELINE = PipelineId("p")
CUTS = ((0, 1), (1, 2))


class End:
    """One stage's links, and what came over them."""

    def __init__(self, index: int, secret: str = "word") -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.frames: list[tuple[int, Message, bytes]] = []
        self.lost: list[tuple[int, str]] = []
        stage = Stage(pipeline=PIPELINE, index=index, cuts=CUTS)
        self.links = StageLinks(
            stage,
            secret,
            self.listener,
            lambda stage, message, payload: self.frames.append((stage, message, bytes(payload))),
            lambda stage, why: self.lost.append((stage, why)),
        )

    def to(self, other: End) -> None:
        self.links.connect(other.links.stage.index, socket.create_connection(other.address))


@contextlib.contextmanager
def two(secret: str = "word") -> Iterator[tuple[End, End]]:
    first, second = End(0), End(1, secret)
    try:
        first.to(second)
        second.to(first)
        yield first, second
    finally:
        first.links.close()
        second.links.close()


def test_frames_come_whole_and_in_order() -> None:
    payload = os.urandom(3_000_000)
    with two() as (first, second):
        assert first.links.wait(5)
        first.links.send(1, StepResult(1), payload)
        first.links.send(1, StepResult(2))
        wait_until(lambda: len(second.frames) == 2, 5, what="frames")
        assert second.frames == [(0, StepResult(1), payload), (0, StepResult(2), b"")]
        assert not first.lost
        assert not second.lost


def test_a_quiet_link_stands() -> None:
    with two() as (first, second):
        assert first.links.wait(5)
        ends_s = time.monotonic() + 1.5 * SILENCE_S
        wait_until(lambda: time.monotonic() > ends_s, 5, what="silence")
        assert not first.lost
        assert not second.lost


def test_a_link_through_the_store_may_be_silent_for_longer_but_not_for_ever() -> None:
    end = End(0)
    with contextlib.closing(end.links), socket.create_connection(end.address) as link:
        send_frame(link, Hello(PIPELINE, 1, "word", relayed=True))
        ends_s = time.monotonic() + 1.5 * SILENCE_S
        wait_until(lambda: time.monotonic() > ends_s, 5, what="silence")
        assert not end.lost
        wait_until(lambda: end.lost, RELAYED_FACTOR * SILENCE_S, what="the loss")
        assert end.lost == [(1, "link from it: silent for too long")]


def test_a_stage_whose_node_carries_its_words_says_so_first() -> None:
    end, (ours, theirs) = End(0), socket.socketpair()
    with contextlib.closing(end.links), ours:
        end.links.connect(1, theirs)
        assert receive_frame(ours)[0] == Hello(PIPELINE, 0, "word", relayed=True)


def test_a_closed_link_is_noticed_at_once_and_told_once() -> None:
    with two() as (first, second):
        assert first.links.wait(5)
        second.links.close()
        wait_until(lambda: first.lost, SILENCE_S, what="the loss")
        with pytest.raises(LinkBroken, match="stage 1 is lost"):
            first.links.send(1, StageLoaded())
        assert len(first.lost) == 1
        assert not second.lost, "who closes loses nobody"


def test_a_silent_link_is_noticed() -> None:
    first = End(0)
    try:
        with socket.create_connection(first.address) as silent:
            send_frame(silent, Hello(PIPELINE, 1, "word"))
            wait_until(lambda: first.lost, SILENCE_S + 5, what="the loss")
            assert "silent" in first.lost[0][1]
    finally:
        first.links.close()


def test_who_has_not_the_secret_is_no_stage() -> None:
    with two(secret="another") as (first, second):
        wait_until(lambda: second.lost and first.lost, 5, what="refusals")  # each finds its own connection closed
        assert not first.frames
        assert not second.frames


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        HEAD.pack(MAGIC, FORMAT, 1 << 31, 0),
        HEAD.pack(MAGIC, FORMAT, 4, 0) + b"\xc1\xc1\xc1\xc1",
        HEAD.pack(MAGIC, FORMAT, 9, 0) + b"\x81\xa4type\xa2\xff\xff",
        HEAD.pack(MAGIC, FORMAT + 1, 0, 0),
        HEAD.pack(MAGIC, FORMAT, 0, 1 << 31),
    ],
)
def test_nonsense_is_refused_before_and_a_loss_after_the_greeting(said: bytes) -> None:
    first = End(0)
    try:
        with socket.create_connection(first.address) as stranger:
            stranger.sendall(said)
            stranger.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        assert not first.lost
        with socket.create_connection(first.address) as stage:
            send_frame(stage, Hello(PIPELINE, 1, "word"))
            stage.sendall(said)
            wait_until(lambda: first.lost, 5, what="the loss")
    finally:
        first.links.close()


def test_a_second_link_of_one_stage_and_stages_of_others_are_refused() -> None:
    with two() as (first, second):
        assert first.links.wait(5)
        for hello in (Hello(PIPELINE, 1, "word"), Hello(PipelineId("q"), 1, "word"), Hello(PIPELINE, 7, "word")):
            with socket.create_connection(first.address) as again:
                send_frame(again, hello)
                again.settimeout(5)
                with contextlib.suppress(ConnectionResetError):
                    assert again.recv(1) == b""
        second.links.send(0, StageLoaded())
        wait_until(lambda: first.frames == [(1, StageLoaded(), b"")], 5, what="the stage's own frame")


def test_senders_do_not_mix_their_frames() -> None:
    with two() as (first, second):
        assert first.links.wait(5)

        def send(number: int) -> None:
            for _ in range(20):
                first.links.send(1, StepResult(number), bytes([number]) * 50_000)

        threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(second.frames) == 80, 10, what="frames")
        for thread in threads:
            thread.join()
        for _, message, payload in second.frames:
            assert isinstance(message, StepResult)
            assert payload == bytes([message.number]) * 50_000


def test_a_frame_that_is_too_large_is_refused_before_it_is_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(ValueError, match="a frame of"):
            send_frame(ours, Hello(PIPELINE, 0, "x" * (9 << 20)))
        send_frame(ours, Ping())
        assert receive_frame(theirs) == (Ping(), bytearray())
