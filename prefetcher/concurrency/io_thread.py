"""A thread with an event loop of its own for proxied traffic, which must not delay worker starts on the daemon's
loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from fleetstart.runtime.contract.process.tasks import end_tasks

CLOSE_S = 2.0


class IoThread:
    """The thread, started at the first call. Its methods are called from the daemon's loop."""

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
