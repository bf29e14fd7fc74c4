"""The channel: packets stay whole, descriptors travel with them, and a broken peer is a dead peer."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.channel import (
    DESCRIPTORS_MAX,
    MESSAGE_DESCRIPTORS_MAX,
    PACKET_MAX_BYTES,
    Channel,
    ChannelClosed,
    pair,
)
from fleetstart.runtime.contract.node.messages import Drain, Drained, Exited, Fork, Forked, ForkServerMessage, Usage

Ends = tuple[Channel[ForkServerMessage], socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = pair()
    channel: Channel[ForkServerMessage] = Channel(left, ForkServerMessage)
    yield channel, right
    channel.close()
    right.close()


def test_messages_keep_their_order_and_their_borders(ends: Ends) -> None:
    channel, peer = ends
    other: Channel[ForkServerMessage] = Channel(peer, ForkServerMessage)
    other.send(Forked(WorkerId("a"), 1, "mnt"))
    other.send(Exited(WorkerId("a"), -9))
    assert channel.receive()[0] == Forked(WorkerId("a"), 1, "mnt")
    assert channel.receive()[0] == Exited(WorkerId("a"), -9)


def test_descriptors_arrive_with_their_message(ends: Ends) -> None:
    channel, peer = ends
    read_end, write_end = os.pipe()
    Channel[Fork](peer, Fork).send(Exited(WorkerId("a"), 0), (write_end,))
    os.close(write_end)
    _, descriptors = channel.receive()
    os.write(descriptors[0], b"through")
    os.close(descriptors[0])
    assert os.read(read_end, 10) == b"through"
    os.close(read_end)


def test_more_descriptors_than_a_packet_takes_arrive_in_their_order(ends: Ends) -> None:
    channel, peer = ends
    sent = [os.memfd_create(str(number)) for number in range(2 * DESCRIPTORS_MAX + 7)]
    Channel[Fork](peer, Fork).send(Exited(WorkerId("a"), 0), sent)
    Channel[Fork](peer, Fork).send(Exited(WorkerId("b"), 0))

    message, received = channel.receive()

    assert message == Exited(WorkerId("a"), 0)
    assert [os.fstat(fd).st_ino for fd in received] == [os.fstat(fd).st_ino for fd in sent]
    assert channel.receive() == (Exited(WorkerId("b"), 0), [])
    for fd in (*sent, *received):
        os.close(fd)


def test_a_flood_of_descriptors_closes_the_channel_and_leaks_none(ends: Ends) -> None:
    channel, peer = ends
    before = len(os.listdir("/proc/self/fd"))
    fd = os.memfd_create("one")
    flood = MESSAGE_DESCRIPTORS_MAX // DESCRIPTORS_MAX + 1

    def send() -> None:
        for _ in range(flood):
            socket.send_fds(peer, [b"+"], [fd] * DESCRIPTORS_MAX)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(ChannelClosed, match=r"more than|cut"):
        channel.receive()
    sender.join(10)
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_end_of_the_peer_is_an_error_not_a_wait(ends: Ends) -> None:
    channel, peer = ends
    peer.close()
    with pytest.raises(ChannelClosed):
        channel.receive()
    with pytest.raises(ChannelClosed):
        channel.send(Drained())


@pytest.mark.parametrize(
    "packet",
    [
        b"not json", b"{}", b'{"type":"unheard_of"}', b'{"type":"exited","worker":1}',
        b'{"type":"exited","worker":"\xa6","status":0}', b'{"type":"exited","x":' + b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_not_understood_closes_and_leaks_no_descriptor(ends: Ends, packet: bytes) -> None:
    channel, peer = ends
    before = len(os.listdir("/proc/self/fd"))
    read_end, write_end = os.pipe()
    socket.send_fds(peer, [packet], [write_end])
    os.close(write_end)
    with pytest.raises(ChannelClosed, match="not understood"):
        channel.receive()
    os.close(read_end)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_non_blocking_end_says_that_nothing_is_there(ends: Ends) -> None:
    channel, _ = ends
    channel.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        channel.receive()


def test_a_packet_of_the_largest_size_passes_and_a_larger_one_is_refused(ends: Ends) -> None:
    channel, peer = ends
    reason = "x" * (PACKET_MAX_BYTES - 200)
    Channel[Usage](peer, Usage).send(Forked(WorkerId("a"), 1, reason))
    received, _ = channel.receive()
    assert isinstance(received, Forked)
    assert received.isolation == reason
    with pytest.raises(ValueError, match="at most"):
        channel.send(Forked(WorkerId("a"), 1, "x" * PACKET_MAX_BYTES))


def test_drain_is_no_message_for_who_expects_others(ends: Ends) -> None:
    channel, peer = ends
    Channel[Usage](peer, Usage).send(Drain(1.0))
    with pytest.raises(ChannelClosed):
        channel.receive()
