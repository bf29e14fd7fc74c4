"""One execution of an async call: what is said of it when it is cut off in the midst of its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import redis.asyncio as redis

from fleetstart.controller.async_invocations.execution import Execution
from fleetstart.controller.async_invocations.store import lifecycle
from fleetstart.controller.async_invocations.store.event_log import START, EventLog
from fleetstart.controller.async_invocations.store.invocations import InvocationStore, StoredInvocation
from fleetstart.controller.async_invocations.store.payloads import PayloadStore
from fleetstart.controller.async_invocations.store.redis_clock import RedisClock
from fleetstart.controller.async_invocations.submit import AsyncSubmitter
from fleetstart.controller.state.invocation_records import Answer, Progress
from fleetstart.controller.storage.folder_store import FolderStore
from fleetstart.runtime.contract.errors import StoreFailed
from fleetstart.runtime.contract.ids import InvocationId
from tests.controller.async_invocations.test_stepped_clocks import allowed, envelope


class BusyStore(PayloadStore):
    """A store that fails the first write of an answer."""

    failed = False

    async def keep_answer(self, invocation: InvocationId, answer: Answer, body: bytes) -> None:
        if not self.failed:
            self.failed = True
            raise StoreFailed("503 SlowDown")
        await super().keep_answer(invocation, answer, body)


class HangingStore(PayloadStore):
    """A store that takes no answer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(FolderStore(folder))
        self.asked = asyncio.Event()

    async def keep_answer(self, *_: Any) -> None:
        self.asked.set()
        await asyncio.Event().wait()


class LosesACancellation(InvocationStore):
    """Loses one that comes while a lease is renewed, as redis-py does with Python 3.11 while it sends a command."""

    def __init__(self, client: redis.Redis) -> None:
        super().__init__(client)
        self.renewing = asyncio.Event()

    async def write(self, entry: StoredInvocation, progress: Progress, *, publish: str = "") -> StoredInvocation | None:
        if entry.progress.status == progress.status == "running" and not self.renewing.is_set():
            self.renewing.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return await super().write(entry, progress, publish=publish)


EVENT_STREAM = [(b"content-type", b"text/event-stream")]


async def claimed(invocations: InvocationStore, payloads: PayloadStore, clock: RedisClock) -> StoredInvocation:
    """A call that was accepted and claimed."""
    await clock.refresh()
    call = envelope(7, time.time_ns() // 1_000_000)
    await AsyncSubmitter(invocations, payloads, allowed, clock).accept(call, b"")
    entry = await invocations.get(InvocationId(call.id))
    assert entry is not None
    mine = await invocations.write(entry, lifecycle.claimed(entry.progress, "gw", clock.now_unix_ms()))
    assert mine is not None
    return mine


async def answers(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"1"})


def test_a_call_whose_gateway_ends_before_its_answer_is_stored_is_queued_again(redis_url: str, tmp_path: Path) -> None:
    """It was said to have succeeded, and its answer was nowhere."""

    async def cut_off() -> Progress:
        async with redis.from_url(redis_url) as client:
            invocations, payloads, clock = InvocationStore(client), HangingStore(tmp_path), RedisClock(client)
            mine = await claimed(invocations, payloads, clock)
            running = asyncio.create_task(Execution(mine, client, invocations, payloads, answers, clock).run())
            await asyncio.wait_for(payloads.asked.wait(), 20)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            ended = await invocations.get(mine.envelope.id)
            assert ended is not None
            return ended.progress

    progress = asyncio.run(cut_off())
    assert (progress.status, progress.answer) == ("queued", None)


def test_a_call_runs_once_though_the_store_takes_its_answer_at_the_second_try(redis_url: str, tmp_path: Path) -> None:
    """The call ran again, under an id of its own in the ledger: two bills."""
    runs = 0

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        nonlocal runs
        runs += 1
        await answers(scope, receive, send)

    async def run() -> Progress:
        async with redis.from_url(redis_url) as client:
            invocations, clock = InvocationStore(client), RedisClock(client)
            payloads = BusyStore(FolderStore(tmp_path))
            mine = await claimed(invocations, payloads, clock)
            await Execution(mine, client, invocations, payloads, counted, clock).run()
            ended = await invocations.get(mine.envelope.id)
            assert ended is not None
            kept = await payloads.answer(mine.envelope.id, ended.progress.claims)
            assert kept is not None
            assert kept[1] == b"1"
            return ended.progress

    progress = asyncio.run(run())
    assert (progress.status, progress.runs, progress.losses, runs) == ("succeeded", 1, 0, 1)


def test_a_call_ends_though_its_lease_task_loses_the_cancellation(redis_url: str, tmp_path: Path) -> None:
    """It was renewed for ever: a call whose run had ended stayed `running`, and had no answer."""

    async def run() -> Progress:
        async with redis.from_url(redis_url) as client:
            invocations, clock = LosesACancellation(client), RedisClock(client)
            payloads = PayloadStore(FolderStore(tmp_path))
            mine = await claimed(invocations, payloads, clock)

            async def ends_in_a_renewal(scope: Any, receive: Any, send: Any) -> None:
                execution.look()
                await invocations.renewing.wait()
                await answers(scope, receive, send)

            execution = Execution(mine, client, invocations, payloads, ends_in_a_renewal, clock)
            running = asyncio.create_task(execution.run())
            over, _ = await asyncio.wait([running], timeout=20)
            assert over, "it goes on"
            ended = await invocations.get(mine.envelope.id)
            assert ended is not None
            return ended.progress

    assert asyncio.run(run()).status == "succeeded"


EVENTS = 200


def test_events_that_redis_refuses_are_not_sent_again_with_each_new_one(redis_url: str, tmp_path: Path) -> None:
    """Each event sent all before it once more: 20,100 commands for 200 events, and 62 s of CPU for 1,200."""

    async def run() -> None:
        async with redis.from_url(redis_url) as client:
            invocations, clock = InvocationStore(client), RedisClock(client)
            payloads = PayloadStore(FolderStore(tmp_path))
            mine = await claimed(invocations, payloads, clock)
            events = EventLog(client, mine.envelope.id)

            async def streams(scope: Any, receive: Any, send: Any) -> None:
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
                await client.config_set("maxmemory", 1)
                for number in range(EVENTS):
                    await send({"type": "http.response.body", "body": b"data: %d\n\n" % number, "more_body": True})
                await client.config_set("maxmemory", 0)
                async with asyncio.timeout(20):  # they come without another event
                    while not await events.last():
                        await asyncio.sleep(0.01)
                await send({"type": "http.response.body", "body": b"data: end\n\n"})

            await Execution(mine, client, invocations, payloads, streams, clock).run()
            ended = await invocations.get(mine.envelope.id)
            assert ended is not None
            assert ended.progress.status == "succeeded"
            found, last = list[bytes](), START
            while page := await events.after(last):
                found, last = [*found, *(event.data for event in page)], page[-1].id
            assert found == [*(b"data: %d" % number for number in range(EVENTS)), b"data: end"]
            sent = (await client.info("commandstats"))["cmdstat_xadd"]
            assert sent["calls"] + sent["rejected_calls"] < 2 * EVENTS

    asyncio.run(run())
