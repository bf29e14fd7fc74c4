"""Ending tasks, those included that lose a cancellation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from fleetstart.runtime.contract.process.tasks import end_tasks, in_parallel, run_all, wait_at_most

WAIT_S = 10.0


async def for_ever() -> None:
    await asyncio.Event().wait()


async def loses_two() -> None:
    for _ in range(2):
        with contextlib.suppress(asyncio.CancelledError):
            await for_ever()
    await for_ever()


async def fails() -> None:
    try:
        await for_ever()
    finally:
        raise ValueError("at the end")


async def returns() -> None: ...


@pytest.mark.parametrize("work", [for_ever, loses_two, fails, returns])
def test_every_task_ends_and_none_speaks_for_it(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(WAIT_S):
            tasks = [asyncio.ensure_future(work()) for _ in range(3)]
            await asyncio.sleep(0)
            await end_tasks(tasks)
            assert all(task.done() for task in tasks)

    asyncio.run(main())


def test_a_cancellation_that_comes_together_with_a_result_is_not_the_last() -> None:
    """As redis-py sends: Python 3.11's wait_for returns the result and forgets that it was told to stop."""

    async def sends(sent: asyncio.Future[None]) -> None:
        await asyncio.wait_for(sent, WAIT_S)
        await for_ever()

    async def main() -> None:
        async with asyncio.timeout(WAIT_S):
            sent = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(sends(sent))
            await asyncio.sleep(0)
            sent.set_result(None)
            await end_tasks([task])
            assert task.done()

    asyncio.run(main())


def test_nothing_is_ended_at_once() -> None:
    asyncio.run(end_tasks([]))


def test_who_is_cancelled_meanwhile_is_so_when_all_have_ended() -> None:
    async def main() -> None:
        async with asyncio.timeout(WAIT_S):
            deaf = asyncio.create_task(loses_two())
            await asyncio.sleep(0)
            ending = asyncio.create_task(end_tasks([deaf]))
            await asyncio.sleep(0)
            ending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await ending
            assert deaf.done()

    asyncio.run(main())


def test_what_runs_together_ends_with_its_part_though_a_cancellation_is_lost() -> None:
    """A part of the controller that had its tasks in a TaskGroup kept a controller from going down, now and then."""

    async def main() -> None:
        async with asyncio.timeout(WAIT_S):
            works: list[asyncio.Task[None]] = []

            async def noted() -> None:
                task = asyncio.current_task()
                assert task is not None
                works.append(task)
                await loses_two()

            part = asyncio.create_task(run_all(noted(), noted()))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await end_tasks([part])
            assert part.cancelled()
            assert [work.done() for work in works] == [True, True]

    asyncio.run(main())


def test_the_first_failure_ends_the_others_and_is_raised() -> None:
    others: list[asyncio.Task[None]] = []

    async def other() -> None:
        task = asyncio.current_task()
        assert task is not None
        others.append(task)
        await for_ever()

    async def broken() -> None:
        raise ValueError("broken")

    async def main() -> None:
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(ValueError, match="broken"):
                await run_all(other(), broken())
            assert others[0].cancelled()
            await run_all(returns(), returns())

    asyncio.run(main())


def test_work_is_done_for_so_many_at_a_time() -> None:
    async def main() -> None:
        done: list[int] = []
        under_way = most = 0

        async def work(item: int) -> None:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0)
            under_way -= 1
            if item == 777:
                raise ValueError("broken")
            done.append(item)

        async with asyncio.timeout(WAIT_S):
            await in_parallel(8, range(100), work)
            assert (sorted(done), most) == (list(range(100)), 8)
            with pytest.raises(ValueError, match="broken"):
                await in_parallel(8, (777, *range(100, 200)), work)
            assert max(done) < 120, "no other begins after a failure"

    asyncio.run(main())


def test_no_more_tasks_are_started_than_there_is_work_for() -> None:
    async def main() -> None:
        most = 0

        async def work(_: int) -> None:
            nonlocal most
            most = max(most, len(asyncio.all_tasks()) - 1)
            await asyncio.sleep(0)

        await in_parallel(8, (), work)
        assert most == 0
        await in_parallel(8, range(2), work)
        assert most == 2

    asyncio.run(main())


def test_a_wait_ends_with_its_event_or_its_time_and_leaves_no_timer() -> None:
    async def main() -> None:
        async with asyncio.timeout(WAIT_S):
            event = asyncio.Event()
            await wait_at_most(event, 0.001)
            assert event.is_set()
            event.clear()
            waiting = asyncio.create_task(wait_at_most(event, 0.05))
            await asyncio.sleep(0)
            event.set()
            await waiting
            event.clear()
            cancelled = asyncio.create_task(wait_at_most(event, 0.05))
            await asyncio.sleep(0)
            await end_tasks([cancelled])
            await asyncio.sleep(0.1)
            assert not event.is_set(), "a timer that was left set it"

    asyncio.run(main())
