"""Ending tasks, those included that lose a cancellation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from fleetstart.runtime.contract.tasks import end_tasks

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
