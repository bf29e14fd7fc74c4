"""One call of a synchronous handler in a thread of a pool, joined to the loop: its result, or what its generator gives.

A thread cannot be cancelled: whoever waits for a job to have ended keeps its slot until the thread is done with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from ..sdk.responses import Response

ITEMS_AHEAD = 16
"""How many items a synchronous generator may be ahead of its reader."""


class ThreadCall:
    """The whole generator runs in one thread, because code between two yields may rely on the thread that it
    is in (torch.inference_mode does). `ended` is set when the thread is done with the call, always last.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._stopped = False
        self._room = threading.Semaphore(ITEMS_AHEAD)
        self._queue: asyncio.Queue[tuple[Any, BaseException | None, bool]] = asyncio.Queue()
        self.streams = False
        """Once there is a result: whether it is a generator, whose items are to be had one by one."""
        self.result: asyncio.Future[Any] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    def run(self, work: Callable[[], Any]) -> None:
        """In the pool thread. Raises nothing: what the work raises goes to whom waits for it."""
        try:
            result = work()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._settle, None, error, True)
            return
        items = result.body if isinstance(result, Response) else result
        if not inspect.isgenerator(items):
            self._loop.call_soon_threadsafe(self._settle, result, None, True)
            return
        self.streams = True
        self._loop.call_soon_threadsafe(self._settle, result, None, False)
        failure: BaseException | None = None
        try:
            with contextlib.closing(items):
                for item in items:
                    self._room.acquire()
                    if self._stopped:
                        break
                    self._loop.call_soon_threadsafe(self._queue.put_nowait, (item, None, True))
        except BaseException as error:
            failure = error
        self._loop.call_soon_threadsafe(self._finish, failure)

    def _settle(self, result: Any, error: BaseException | None, ended: bool) -> None:
        # A call that was cancelled in the meantime has cancelled the future: its result is dropped.
        if not self.result.done():
            if error is None:
                self.result.set_result(result)
            else:
                self.result.set_exception(as_exception(error))
        if ended:
            self.ended.set_result(None)

    def _finish(self, failure: BaseException | None) -> None:
        self._queue.put_nowait((None, failure, False))
        self.ended.set_result(None)

    async def items(self) -> AsyncIterator[Any]:
        while True:
            item, failure, more = await self._queue.get()
            self._room.release()
            if failure is not None:
                raise as_exception(failure)
            if not more or self._stopped:
                return
            yield item

    def stop(self) -> None:
        """The generator ends at its next item."""
        self._stopped = True
        self._room.release()


def as_exception(error: BaseException) -> Exception:
    """SystemExit and the like end a call, not the worker; StopIteration cannot pass through a future."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    wrapped = RuntimeError(f"the handler raised {type(error).__name__}: {error}")
    wrapped.__traceback__ = error.__traceback__
    return wrapped


async def wait_for_end(ended: asyncio.Future[None]) -> None:
    """Waits even when cancelled, and passes the cancellation on afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
