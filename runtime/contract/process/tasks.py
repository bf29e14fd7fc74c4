"""Ends asyncio tasks: cancels them again until they have ended, since Python 3.11 can lose a cancellation.

`anyio` also delivers a cancellation again, but the contract imports no third library, and anyio ends only tasks of its
own group: callers end tasks that they started themselves, and get the first error itself, not an ExceptionGroup.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from itertools import chain, islice
from typing import Any, TypeVar

Item = TypeVar("Item")

AGAIN_S = 0.2
"""Time for a task to end before it is cancelled again."""


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks until every one has ended, and drops what they raise. For tasks that end at once when cancelled.

    Once is not enough: `asyncio.wait_for` of Python 3.11 loses a cancellation that arrives together with its result,
    and redis-py sends with it. The task then goes on as if it had not been cancelled. A cancellation of the caller
    is raised once all tasks have ended, since nothing else would end them.
    """
    ending = dict.fromkeys(tasks)  # in their order, which a set would draw from addresses
    interrupted: asyncio.CancelledError | None = None
    while pending := [task for task in ending if not task.done()]:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=AGAIN_S)
        except asyncio.CancelledError as error:
            interrupted = error
    for task in ending:
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio would log it
    if interrupted is not None:
        raise interrupted


async def run_all(*works: Coroutine[Any, Any, None]) -> None:
    """Runs coroutines concurrently until all have ended, one fails, or the caller is cancelled; none is left then.

    As asyncio.TaskGroup does, which cancels only once and waits for ever for a task that has lost that.

    Errors: that of the first coroutine that fails.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        await end_tasks(tasks)


async def in_parallel(most: int, items: Iterable[Item], work: Callable[[Item], Awaitable[None]]) -> None:
    """Does the work for each item, for so many at a time. Errors: that of the first that fails; none begins then."""
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await work(item)

    first = list(islice(waiting, most))
    if first:
        waiting = chain(first, waiting)
        await run_all(*(worker() for _ in first))


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Waits for an event, at most so long: then it sets the event itself. For loops that begin their next round when
    something has happened and at the latest after a while, and clear the event themselves.

    `asyncio.timeout` would cancel the task and raise, which takes several times the processor time of the timer, and
    a controller has some ten such rounds a second with nothing to do.
    """
    timer = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()
