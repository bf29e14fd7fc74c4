"""ASGI app around a handler: decodes arguments, runs the handler, writes JSON, bytes or events.

Synchronous code runs in a pool of as many threads as the worker has slots; asynchronous code runs on the
loop and is cancelled when its client disconnects. A generator, of either kind, becomes a stream of server-sent events;
the response begins with the first item, so that a failure before it is a plain 500. `batching` calls a batched handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..sdk.context import CallState, current_call
from ..sdk.decorators import batching_of
from ..sdk.responses import Response
from ..worker_io.asgi import App, ClientDisconnected, Receive, Scope, Send, read_body
from ..worker_io.user_errors import as_exception
from .batching import Batcher, wait_for_end
from .forms import MULTIPART, Form, form_of_body, media_type, read_form
from .request_args import ArgumentDecoder, Arguments, argument_decoder
from .response_writer import ResponseWriter, progress_mode
from .result_encoding import result_encoding_of

Run = Callable[[Arguments, CallState, ResponseWriter], Awaitable[None]]


def is_asgi(target: Any) -> bool:
    """Checks whether the target is an ASGI app: a callable of (scope, receive, send), by parameter names."""
    return _parameter_names(target)[:3] == ["scope", "receive", "send"]


def is_wsgi(target: Any) -> bool:
    """Checks whether the target is a WSGI app, such as one of Flask or Django, by its parameters' names."""
    return _parameter_names(target)[:2] == ["environ", "start_response"]


def _parameter_names(target: Any) -> list[str]:
    try:
        return list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return []


def handler_app(
    handler: Callable[..., Any], *, slots: int, bundle_dir: str, returns: Callable[..., Any] | None = None
) -> App:
    """Builds the app. `returns`: the callable whose return annotation applies, if not the handler's own.

    Errors: TypeError for a signature that cannot be served, NameError for an annotation with an undefined name.
    """
    batching = batching_of(handler)
    inputs = argument_decoder(handler, batched=batching is not None)
    outputs = result_encoding_of(returns or handler, batched=batching is not None)
    called = handler if inspect.isroutine(handler) else type(handler).__call__
    run: Run
    after_use = _at_once
    if batching is not None:
        batcher = Batcher(handler, batching, inputs, slots=slots)
        run, after_use = _in_batches(batcher), batcher.after_batch
    elif inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        run = _on_loop(handler)
    else:
        run = _in_threads(handler, ThreadPoolExecutor(slots, thread_name_prefix="handler"))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        form: Form | None = None
        try:
            arguments, form = await _read(inputs, scope, receive)
        except ClientDisconnected:
            return
        call = current_call(scope)
        call.body_was_read(receive)
        reply = ResponseWriter(send, call, outputs, bundle_dir, progress=progress_mode(scope))
        try:
            await run(arguments, call, reply)
        except Exception as error:
            await reply.failed(error)
        finally:
            reply.close()
            call.end()
            if form is not None:
                after_use(arguments, form.close)

    return app


def _at_once(arguments: Arguments, release: Callable[[], None]) -> None:
    release()


async def _read(inputs: ArgumentDecoder, scope: Scope, receive: Receive) -> tuple[Arguments, Form | None]:
    """Reads and decodes the request. Errors: InvalidInput, TooLarge, ClientDisconnected."""
    media, content_type = media_type(scope["headers"])
    if media == MULTIPART:
        form = await read_form(receive, content_type)
    elif inputs.takes_file:
        form = form_of_body(await read_body(receive), content_type)
    else:
        return inputs.read(await read_body(receive), scope["query_string"], media), None
    try:
        return inputs.read_form(form), form
    except BaseException:
        form.close()
        raise


# ── on the loop ────────────────────────────────────────────────────────────────────────────────────


def _on_loop(handler: Callable[..., Any]) -> Run:
    async def work(arguments: Arguments, reply: ResponseWriter) -> None:
        await _send(handler(*arguments[0], **arguments[1]), reply)

    async def run(arguments: Arguments, call: CallState, reply: ResponseWriter) -> None:
        await _cancellable(work(arguments, reply), call, reply)

    return run


def _in_batches(batcher: Batcher) -> Run:
    async def work(arguments: Arguments, reply: ResponseWriter) -> None:
        await reply.value(await batcher.call(arguments))

    async def run(arguments: Arguments, call: CallState, reply: ResponseWriter) -> None:
        await _cancellable(work(arguments, reply), call, reply)

    return run


async def _cancellable(work: Awaitable[None], call: CallState, reply: ResponseWriter) -> None:
    """Runs the work in the call's own task, and cancels it when the client disconnects."""
    task = asyncio.current_task()
    assert task is not None
    left = False

    def leave(watcher: asyncio.Task[None]) -> None:
        nonlocal left
        if not watcher.cancelled() and not reply.complete:
            left = True
            task.cancel()

    watcher = call.watch()
    watcher.add_done_callback(leave)
    try:
        await work
    except asyncio.CancelledError:
        if not left:
            raise
        task.uncancel()
    except (SystemExit, KeyboardInterrupt) as error:
        raise as_exception(error) from error
    finally:
        watcher.remove_done_callback(leave)


def _streamed(result: Any) -> Iterator[Any] | AsyncIterator[Any] | None:
    """The source of a result that is sent piece by piece: a generator, or any iterator that is a `Response`'s body."""
    if isinstance(result, Response):
        return result.body if isinstance(result.body, Iterator | AsyncIterator) else None
    return result if inspect.isgenerator(result) or inspect.isasyncgen(result) else None


async def _send(result: Any, reply: ResponseWriter) -> None:
    if inspect.isawaitable(result):
        result = await result
    streamed = _streamed(result)
    if streamed is None:
        await reply.value(result)
        return
    async with contextlib.aclosing(streamed if inspect.isasyncgen(streamed) else _each(streamed)) as items:
        if isinstance(result, Response):
            await reply.pieces(result, items)
        else:
            await reply.events(items)


async def _each(items: Iterator[Any] | AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    if isinstance(items, AsyncIterator):
        async for item in items:
            yield item
        return
    for item in items:
        yield item
        await asyncio.sleep(0)


# ── in threads ─────────────────────────────────────────────────────────────────────────────────────


def _in_threads(handler: Callable[..., Any], pool: ThreadPoolExecutor) -> Run:
    """Runs the handler in a pool. A thread cannot be cancelled: the call keeps its slot until the thread is done."""

    async def run(arguments: Arguments, call: CallState, reply: ResponseWriter) -> None:
        job = ThreadCall(asyncio.get_running_loop())
        pool.submit(contextvars.copy_context().run, job.run, lambda: handler(*arguments[0], **arguments[1]))
        try:
            result = await job.result
            if inspect.isawaitable(result) or isinstance(_streamed(result), AsyncIterator):
                # Of a decorator around an asynchronous function, for example.
                await _cancellable(_send(result, reply), call, reply)
                return
            if not job.streams:
                await reply.value(result)
                return
            call.watch().add_done_callback(lambda _: job.stop())
            if isinstance(result, Response):
                await reply.pieces(result, job.items())
            else:
                await reply.events(job.items())
        finally:
            job.stop()
            await wait_for_end(job.ended)

    return run


ITEMS_AHEAD = 16
"""Items that a synchronous generator may be ahead of its reader."""


class ThreadCall:
    """One call of a synchronous handler in a pool thread, with its result or its generator's items on the loop.

    The whole generator runs in one thread, because code between two yields may rely on the thread that it
    is in (torch.inference_mode does). `ended` is set last, when the thread is done with the call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._stopped = False
        self._free_items = threading.Semaphore(ITEMS_AHEAD)
        self._queue: asyncio.Queue[tuple[Any, BaseException | None, bool]] = asyncio.Queue()
        self.streams = False
        """True if the result is a generator, read with `items`; valid once `result` is set."""
        self.result: asyncio.Future[Any] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    def run(self, work: Callable[[], Any]) -> None:
        """Runs the work in the pool thread. Raises nothing: errors are set on `result` or raised by `items`."""
        try:
            result = work()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._settle, None, error, True)
            return
        items = _streamed(result)
        if not isinstance(items, Iterator):
            self._loop.call_soon_threadsafe(self._settle, result, None, True)
            return
        self.streams = True
        self._loop.call_soon_threadsafe(self._settle, result, None, False)
        failure: BaseException | None = None
        closing: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if inspect.isgenerator(items):
            closing = contextlib.closing(items)
        try:
            with closing:
                for item in items:
                    self._free_items.acquire()
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
        """Items of the generator as they come. Errors: what the generator raises."""
        while True:
            item, failure, more = await self._queue.get()
            self._free_items.release()
            if failure is not None:
                raise as_exception(failure)
            if not more or self._stopped:
                return
            yield item

    def stop(self) -> None:
        """Stops the generator at its next item."""
        self._stopped = True
        self._free_items.release()
