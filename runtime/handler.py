"""The user's function or object as an ASGI app: arguments in, JSON, bytes or events out.

Synchronous code runs in a pool of as many threads as the worker has slots; asynchronous code runs on the
loop and is cancelled when its client goes away. A generator, of either kind, becomes a stream of
server-sent events; the response begins with the first item, so that a failure before it is a plain 500.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from fleetstart.runtime import blame
from fleetstart.runtime.asgi import JSON, App, Disconnected, Receive, Scope, Send, read_body, respond
from fleetstart.runtime.contract.errors import ErrorBody, FleetError, HandlerFailed
from fleetstart.runtime.contract.messages import REQUEST_HEADER
from fleetstart.runtime.inputs import inputs_of

EVENTS_AHEAD = 16
"""How many items a synchronous generator may be ahead of its reader."""

_REQUEST = REQUEST_HEADER.encode()
_OCTETS = b"application/octet-stream"
_EVENT_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]


def is_asgi(target: Any) -> bool:
    """Whether it is called as an ASGI app is: with (scope, receive, send), by name or as a framework's object."""
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return False
    return names[:3] == ["scope", "receive", "send"]


def handler_app(handler: Callable[..., Any], *, slots: int, bundle_dir: str) -> App:
    """Errors: those of `inputs_of`."""
    inputs = inputs_of(handler)
    called = handler if inspect.isroutine(handler) else type(handler).__call__
    asynchronous = inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called)
    pool = None if asynchronous else ThreadPoolExecutor(slots, thread_name_prefix="handler")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive)
        except Disconnected:
            return
        arguments, named = inputs.read(body, scope["query_string"])
        reply = _Reply(send, _request(scope), bundle_dir)
        if pool is None:
            await _run_async(handler, arguments, named, receive, reply)
        else:
            await _run_in_thread(pool, lambda: handler(*arguments, **named), receive, reply)

    return app


def _request(scope: Scope) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == _REQUEST), "")


class _Reply:
    """Sends what a handler gives, in the form that its type asks for."""

    def __init__(self, send: Send, request: str, bundle_dir: str) -> None:
        self._send = send
        self._request = request
        self._bundle_dir = bundle_dir
        self.complete = False

    async def value(self, result: Any) -> None:
        if isinstance(result, bytes | bytearray | memoryview):
            await respond(self._send, 200, bytes(result), _OCTETS)
        else:
            await respond(self._send, 200, encode(result), JSON)
        self.complete = True

    async def events(self, items: AsyncIterator[Any]) -> None:
        """Errors: what the items raise before the first of them; later, it becomes an `error` event."""
        count = 0
        try:
            async for item in items:
                data = encode(item)
                if count == 0:
                    await self._begin_events()
                count += 1
                await self._body(b"id: %d\ndata: %b\n\n" % (count, data))
        except Exception as error:
            if count == 0:
                raise
            await self._body(self._failure(error))
        if count == 0:
            await self._begin_events()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        self.complete = True

    async def _begin_events(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})

    async def _body(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def _failure(self, error: Exception) -> bytes:
        blame.log(error, f"call {self._request or '-'} failed in its stream:")
        if isinstance(error, FleetError):
            info = error.info()
        else:
            info = HandlerFailed(blame.describe(error, self._bundle_dir)).info()
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(ErrorBody(error=info, request_id=self._request))


async def _run_async(handler: Callable[..., Any], arguments: Any, named: Any, receive: Receive, reply: _Reply) -> None:
    """On the loop, in the call's own task, which a watching task cancels when the client goes away."""
    task = asyncio.current_task()
    gone = False

    async def watch() -> None:
        nonlocal gone
        await _until_gone(receive)
        if task is not None and not reply.complete:
            gone = True
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        result = handler(*arguments, **named)
        if inspect.isawaitable(result):
            result = await result
        if inspect.isasyncgen(result):
            async with contextlib.aclosing(result):
                await reply.events(result)
        elif inspect.isgenerator(result):
            await reply.events(_each(result))
        else:
            await reply.value(result)
    except asyncio.CancelledError:
        if not gone or task is None:
            raise
        task.uncancel()
    except (SystemExit, KeyboardInterrupt) as error:
        raise _as_exception(error) from error
    finally:
        watcher.cancel()


async def _run_in_thread(pool: ThreadPoolExecutor, work: Callable[[], Any], receive: Receive, reply: _Reply) -> None:
    """A thread cannot be cancelled: the call lasts, and keeps its slot, until the thread is done with it."""
    job = _Job(asyncio.get_running_loop())
    pool.submit(contextvars.copy_context().run, job.run, work)
    try:
        result = await job.result
        if result is not _Job.STREAMS:
            await reply.value(result)
            return
        watcher = asyncio.create_task(_until_gone(receive))
        watcher.add_done_callback(lambda _: job.stop())
        try:
            await reply.events(job.items())
        finally:
            watcher.cancel()
    finally:
        job.stop()
        await _ended(job.ended)


class _Job:
    """Joins one call in a pool thread to the loop: its plain result, or the items of its generator.

    The whole generator runs in one thread, because code between two yields may rely on the thread that it
    is in (torch.inference_mode does). `ended` is set when the thread is done with the call, always last.
    """

    STREAMS = object()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._stopped = False
        self._room = threading.Semaphore(EVENTS_AHEAD)
        self._queue: asyncio.Queue[tuple[Any, BaseException | None, bool]] = asyncio.Queue()
        self.result: asyncio.Future[Any] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    def run(self, work: Callable[[], Any]) -> None:
        """In the pool thread. Raises nothing: what the work raises goes to whom waits for it."""
        try:
            result = work()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._settle, None, error, True)
            return
        if not inspect.isgenerator(result):
            self._loop.call_soon_threadsafe(self._settle, result, None, True)
            return
        self._loop.call_soon_threadsafe(self._settle, self.STREAMS, None, False)
        failure: BaseException | None = None
        try:
            with contextlib.closing(result):
                for item in result:
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
                self.result.set_exception(_as_exception(error))
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
                raise _as_exception(failure)
            if not more or self._stopped:
                return
            yield item

    def stop(self) -> None:
        """The generator ends at its next item."""
        self._stopped = True
        self._room.release()


def _as_exception(error: BaseException) -> Exception:
    """SystemExit and the like end a call, not the worker; StopIteration cannot pass through a future."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    wrapped = RuntimeError(f"the handler raised {type(error).__name__}: {error}")
    wrapped.__traceback__ = error.__traceback__
    return wrapped


async def _ended(ended: asyncio.Future[None]) -> None:
    """Waits for the thread even when cancelled, and passes the cancellation on afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _each(items: Iterator[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item
        await asyncio.sleep(0)


def encode(value: Any) -> bytes:
    """JSON of what a handler gave. Errors: TypeError that names the type which has no JSON form."""
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    # numpy and torch arrays and scalars: one rule, and neither has to be imported for it.
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"the handler returned a {type(value).__name__}, which has no JSON form")
