"""Writer of a run's events: order, batches, and what is left of a backlog that is longer than the log."""

from __future__ import annotations

import asyncio

from redis.exceptions import OutOfMemoryError

from fleetstart.controller.async_invocations.store.event_log import EVENTS_MAX, START, EventId, EventLog
from fleetstart.controller.async_invocations.store.event_writer import BATCH_MAX, EventWriter
from fleetstart.controller.state.redis_client import connect
from fleetstart.runtime.contract.ids import InvocationId


class FullLog(EventLog):
    """A log that takes nothing while it is full, and notes how many events each write had."""

    full = False

    def __init__(self, redis_url: str) -> None:
        self.client = connect(redis_url)
        super().__init__(self.client, InvocationId("inv-1"))
        self.sizes: list[int] = []

    async def append(self, claim: int, begin: int, events: list[bytes], *, after_gap: bool = False) -> None:
        self.sizes.append(len(events))
        if self.full:
            raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
        await super().append(claim, begin, events, after_gap=after_gap)


def numbered(begin: int, end: int) -> list[bytes]:
    return [b"data: %d" % number for number in range(begin, end)]


async def written(writer: EventWriter) -> None:
    await asyncio.wait_for(writer.wait_written(asyncio.Event()), 20)


def test_a_backlog_is_written_in_batches_after_a_single_event_was_taken(redis_url: str) -> None:
    async def run() -> None:
        log = FullLog(redis_url)
        writer = EventWriter(log, 1)
        log.full = True
        await writer.add(numbered(0, 100))
        await writer.add(numbered(100, 150))
        async with asyncio.timeout(20):
            while len(log.sizes) < 3:
                await asyncio.sleep(0.01)
        log.full = False
        await written(writer)
        assert log.sizes[:3] == [BATCH_MAX, 1, 1]
        assert [size for size in log.sizes[3:] if size > 1] == [64, 64, 21]
        page = await log.after(START)
        rest = await log.after(page[-1].id)
        assert [event.data for event in (*page, *rest)] == numbered(0, 150)
        await log.client.aclose()

    asyncio.run(run())


def test_of_a_backlog_that_is_longer_than_the_log_the_last_events_are_written(redis_url: str) -> None:
    async def run() -> None:
        log = FullLog(redis_url)
        writer = EventWriter(log, 1)
        await writer.add(numbered(1, 11))
        log.full = True
        for number in range(11, EVENTS_MAX + 31):
            await writer.add(numbered(number, number + 1))
        log.full = False
        await written(writer)
        assert (await log.first(), await log.last()) == (EventId(1, 31), EventId(1, EVENTS_MAX + 30))
        assert (await log.after(START))[0].data == b"data: 31"
        await log.client.aclose()

    asyncio.run(run())


def test_events_before_a_gap_leave_the_log_with_the_first_one_after_it(redis_url: str) -> None:
    """A reader of those before would go on behind the gap, and not be told of it."""

    async def run() -> None:
        client = connect(redis_url)
        log = EventLog(client, InvocationId("inv-1"))
        await log.append(1, 1, numbered(1, 11))
        await log.append(1, 21, numbered(21, 23), after_gap=True)
        assert (await log.first(), await log.last()) == (EventId(1, 21), EventId(1, 22))
        await client.aclose()

    asyncio.run(run())


def test_what_waits_is_given_up_with_the_call(redis_url: str) -> None:
    async def run() -> None:
        log, gone = FullLog(redis_url), asyncio.Event()
        writer = EventWriter(log, 1)
        log.full = True
        await writer.add(numbered(0, 1))
        waiting = asyncio.create_task(writer.wait_written(gone))
        gone.set()
        await asyncio.wait_for(waiting, 20)
        await writer.close()
        assert len(asyncio.all_tasks()) == 1
        await log.client.aclose()

    asyncio.run(run())
