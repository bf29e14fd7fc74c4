"""The user's function or object as an ASGI app: arguments in, JSON, bytes or events out.

Synchronous code runs in a pool of as many threads as the worker has slots; asynchronous code runs on the
loop and is cancelled when its client goes away. A generator, of either kind, becomes a stream of
server-sent events; the response begins with the first item, so that a failure before it is a plain 500.
A batched handler is called by `batching`, for many calls at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..sdk.context import CallState, current_call
from ..sdk.decorators import batching_of
from ..sdk.responses import Response
from ..worker_io.asgi import App, ClientDisconnected, Receive, Scope, Send, read_body
from .batching import Batcher
from .forms import MULTIPART, Form, media_type, read_form
from .request_args import ArgumentDecoder, Arguments, argument_decoder
from .response_writer import ResponseWriter, progress_mode
from .result_encoding import result_encoding_of
from .thread_calls import ThreadCall, as_exception, wait_for_end

Run = Callable[[Arguments, CallState, ResponseWriter], Awaitable[None]]


def is_asgi(target: Any) -> bool:
    """Whether it is called as an ASGI app is: with (scope, receive, send), by name or as a framework's object."""
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return False
    return names[:3] == ["scope", "receive", "send"]


def handler_app(
    handler: Callable[..., Any], *, slots: int, bundle_dir: str, answers: Callable[..., Any] | None = None
) -> App:
    """`answers` is what gives the answer, where that is not the handler itself. Errors: TypeError for a signature that
    cannot be served, NameError for an annotation that names nothing."""
    batching = batching_of(handler)
    inputs = argument_decoder(handler, batched=batching is not None)
    outputs = result_encoding_of(answers or handler, batched=batching is not None)
    called = handler if inspect.isroutine(handler) else type(handler).__call__
    run: Run
    if batching is not None:
        run = _in_batches(Batcher(handler, batching, inputs, slots=slots))
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
        reply = ResponseWriter(send, call, outputs, bundle_dir, told=progress_mode(scope))
        try:
            await run(arguments, call, reply)
        except Exception as error:
            await reply.failed(error)
        finally:
            reply.close()
            call.ended()
            if form is not None:
                form.close()

    return app


async def _read(inputs: ArgumentDecoder, scope: Scope, receive: Receive) -> tuple[Arguments, Form | None]:
    """Errors: InvalidInput, TooLarge, Disconnected."""
    media, content_type = media_type(scope["headers"])
    if media != MULTIPART:
        return inputs.read(await read_body(receive), scope["query_string"], media, content_type), None
    form = await read_form(receive, content_type)
    try:
        return inputs.read_form(form), form
    except BaseException:
        form.close()
        raise


# ── on the loop ────────────────────────────────────────────────────────────────────────────────────


def _on_loop(handler: Callable[..., Any]) -> Run:
    async def work(arguments: Arguments, reply: ResponseWriter) -> None:
        result = handler(*arguments[0], **arguments[1])
        if inspect.isawaitable(result):
            result = await result
        await _send(result, reply)

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
    """In the call's own task, which is cancelled when its client goes away."""
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


async def _send(result: Any, reply: ResponseWriter) -> None:
    items = result.body if isinstance(result, Response) else result
    if inspect.isgenerator(items):
        items = _each(items)
    if not inspect.isasyncgen(items):
        await reply.value(result)
        return
    async with contextlib.aclosing(items):
        if isinstance(result, Response):
            await reply.pieces(result, items)
        else:
            await reply.events(items)


async def _each(items: Iterator[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item
        await asyncio.sleep(0)


# ── in threads ─────────────────────────────────────────────────────────────────────────────────────


def _in_threads(handler: Callable[..., Any], pool: ThreadPoolExecutor) -> Run:
    """A thread cannot be cancelled: the call lasts, and keeps its slot, until the thread is done with it."""

    async def run(arguments: Arguments, call: CallState, reply: ResponseWriter) -> None:
        job = ThreadCall(asyncio.get_running_loop())
        pool.submit(contextvars.copy_context().run, job.run, lambda: handler(*arguments[0], **arguments[1]))
        try:
            result = await job.result
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
