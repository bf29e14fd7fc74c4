"""Messages of a forked worker: all of them, in order, and never so many at once that other workers wait."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Awaitable, Callable

import pytest

from fleetstart.prefetcher.processes.forked_process import (
    READS_AT_ONCE,
    ChannelEnded,
    ForkedProcess,
    ProcessEvent,
    ProcessExited,
)
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.channel import Channel, pair
from fleetstart.runtime.contract.node.messages import Drained, Usage, WorkerMessage

DEADLINE_S = 10
FLOOD = [Usage(calls=number, running=0, busy_ns=0) for number in range(5 * READS_AT_ONCE)]

Scene = Callable[[ForkedProcess, socket.socket, list[ProcessEvent]], Awaitable[None]]


def play(scene: Scene) -> None:
    async def played() -> None:
        control, its = pair()
        log_read, log_write = os.pipe()
        process = ForkedProcess(fork_id=WorkerId("w-1"), pool="python", control=control, log_fd=log_read, group=None)
        events: list[ProcessEvent] = []
        process.listen(events.append)
        try:
            with its:
                async with asyncio.timeout(DEADLINE_S):
                    await scene(process, its, events)
        finally:
            process.close()
            os.close(log_write)

    asyncio.run(played())


def flood(its: socket.socket) -> None:
    channel: Channel[WorkerMessage] = Channel(its, WorkerMessage)
    for message in FLOOD:
        channel.send(message)


def test_a_flood_of_messages_gives_the_loop_its_turns_and_all_are_heard() -> None:
    async def scene(process: ForkedProcess, its: socket.socket, events: list[ProcessEvent]) -> None:
        flood(its)
        heard = [0]
        while heard[-1] < len(FLOOD):
            await asyncio.sleep(0)
            heard.append(len(events))
        assert max(after - before for before, after in itertools.pairwise(heard)) <= READS_AT_ONCE
        assert events == FLOOD

    play(scene)


def test_the_last_words_of_one_that_has_ended_come_before_its_end() -> None:
    async def scene(process: ForkedProcess, its: socket.socket, events: list[ProcessEvent]) -> None:
        flood(its)
        Channel[WorkerMessage](its, WorkerMessage).send(Drained())
        process.ended(0)
        assert events[:-1] == [*FLOOD, Drained()]
        assert isinstance(events[-1], ProcessExited)

    play(scene)


@pytest.mark.parametrize(
    ("packet", "descriptors"),
    [(b"+", 0), (b"+", 2), (b'{"type":"drained"}', 2), (b"{", 1), (b'{"type":"drain","grace_s":1}', 0)],
    ids=["ahead of nothing", "many ahead", "many", "half a message", "a node's own"],
)
def test_one_that_breaks_the_rules_is_heard_no_more_and_leaves_no_descriptor(packet: bytes, descriptors: int) -> None:
    async def scene(process: ForkedProcess, its: socket.socket, events: list[ProcessEvent]) -> None:
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(its, [packet], [its.fileno()] * descriptors)
        while not events:
            await asyncio.sleep(0)
        assert [type(event) for event in events] == [ChannelEnded]
        assert len(os.listdir("/proc/self/fd")) == before - 1, "the channel itself is closed"

    play(scene)


def test_what_is_left_of_half_a_message_is_closed_with_it() -> None:
    async def scene(process: ForkedProcess, its: socket.socket, events: list[ProcessEvent]) -> None:
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(its, [b"+"], [its.fileno()])
        process.ended(-9)
        assert [type(event) for event in events] == [ProcessExited]
        process.close()
        assert len(os.listdir("/proc/self/fd")) < before

    play(scene)
