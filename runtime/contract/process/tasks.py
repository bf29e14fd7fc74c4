"""Background tasks of a process: side by side, and to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

AGAIN_S = 0.2
"""For a task to end in order before it is told again."""


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels until every task has ended; what they raise is dropped. For tasks whose own end takes no time.

    Once is not enough: `asyncio.wait_for` of Python 3.11 loses a cancellation that arrives together with its result,
    and redis-py sends with it. The task then goes on as if nobody had spoken. Who is cancelled here meanwhile is so
    when all have ended, since nobody else would end them.
    """
    ending = set(tasks)
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
            task.exception()  # seen, so that asyncio does not complain of it
    if interrupted is not None:
        raise interrupted


async def run_all(*works: Coroutine[Any, Any, None]) -> None:
    """Runs them side by side until all have ended, one fails, or the caller is cancelled; none is left then.

    What TaskGroup does, but with `end_tasks`: a group cancels once, and waits for ever for a task that has lost that.
    Errors: those of the first that fails.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        await end_tasks(tasks)
