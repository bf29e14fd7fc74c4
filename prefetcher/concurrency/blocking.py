"""Blocking calls in daemon threads, awaited from the event loop.

Unlike the loop's own executor, which joins its threads at exit, these never delay the end of the daemon: one read
that hangs would make `fs down` hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def in_thread(call: Callable[[], Result], name: str) -> Result:
    """Runs `call` in a thread; returns or raises what it does. A cancelled caller leaves the thread to end by
    itself."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if outcome.cancelled():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: Result | None = None
        failure: BaseException | None = None
        try:
            result = call()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await outcome
