"""Threads beside the daemon's event loop: blocking calls awaited from it, and a second loop for proxied traffic."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from fleetstart.runtime.contract.process.tasks import end_tasks

Result = TypeVar("Result")


async def in_thread(call: Callable[[], Result], name: str) -> Result:
    """Runs `call` in a daemon thread; returns or raises what it does. A cancelled caller leaves it to end by itself.

    Unlike the loop's own executor, which joins its threads at exit, it never delays the end of the daemon: one read
    that hangs would make `fs down` hang.
    """
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


CLOSE_S = 2.0


class IoThread:
    """A thread with an event loop for proxied traffic, which must not delay worker starts on the daemon's loop.

    Started at the first call. Its methods are called from the daemon's loop.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def call(self, callback: Callable[[], object]) -> None:
        """Runs `callback` in the thread, soon; does nothing once it is closed."""
        if self._closed:
            return
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run, args=(self._loop,), name="proxy-io", daemon=True)
            self._thread.start()
        self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """Cancels everything in the thread and ends it."""
        self._closed = True
        loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(CLOSE_S)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(end_tasks(asyncio.all_tasks(loop)))
    finally:
        loop.close()
