"""Calls of other functions: `from fleetstart.runtime import call, acall`.

The call goes over a link of the gateway that sent the current call (`worker_io.call_links`), so the worker needs no
network and no key. The gateway decides whether the function may be called, passes on deadline and trace, and bills it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from ..contract.call_format import (
    EVENTS,
    NO_ITEM,
    NOTHING,
    EventReader,
    decode_value,
    encode_input,
    raise_for,
)
from ..contract.errors import CallEnded, CallNotDeclared, FleetError, TooLarge, WorkerLost
from ..contract.function_calls import COMPLETE, TOO_BIG, CallRequest, split_callee
from ..contract.worker_headers import AnswerHead
from ..worker_io.call_links import Link, LinkClosed
from ..worker_io.callee_errors import mark_callee
from .context import CallState, current

Value = TypeVar("Value")
_END: Any = object()
_URL = "/?#[]@!$&'()*+,;=:%-._~"
"""What stays as it is in a path with its query; the caller escapes these where they mean themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Options that the calls of a handle have in common."""

    path: str = ""
    method: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    returns: Any = Any


class Call:
    """Calls functions through the platform, from synchronous handlers.

        @function(calls=["embed"])
        def search(text: str) -> list[float]:
            return call("embed", text=text)

    The setting `calls` names the functions that may be called. The callee's deadline is the caller's, its trace is a
    part of the caller's, and it is billed to the same key.
    """

    def __init__(self, options: CallOptions | None = None) -> None:
        self._options = options or CallOptions()

    def __call__(self, function: str, input: Any = NOTHING, /, **arguments: Any) -> Any:
        """Calls a function, and returns its answer: JSON decoded, text, or bytes; of a stream, the list of its items.

        Args:
            function: Its name, or `name@version`.
            input: The input as one value, or bytes.
            **arguments: Instead of `input`, the handler's arguments by their names.

        Raises:
            FleetError: The callee's error, by its type: `NotFound`, `HandlerFailed`, `DeadlineExceeded` and so on.
            RuntimeError: Outside a call, and on the worker's event loop: there, write `await acall(...)`.
        """
        state = _state()
        return _wait(state, _value(state, function, self._options, input, arguments))

    def stream(self, function: str, input: Any = NOTHING, /, **arguments: Any) -> Iterator[Any]:
        """Calls a function, and iterates the items of its answer as they come. Leaving the loop cancels the call."""
        state = _state()
        items = _items(state, function, self._options, input, arguments)
        try:
            while (item := _wait(state, _next(items))) is not _END:
                yield item
        finally:
            _wait(state, items.aclose())  # type: ignore[attr-defined]  # an async generator

    def with_options(
        self,
        *,
        path: str | None = None,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        returns: Any = NOTHING,
    ) -> Call:
        """A handle with other options: a path below the function, a shorter deadline, the type of the answer."""
        return Call(_changed(self._options, path, method, headers, timeout_s, returns))


class AsyncCall:
    """Calls functions through the platform, from asynchronous handlers: `await acall("embed", text=text)`."""

    def __init__(self, options: CallOptions | None = None) -> None:
        self._options = options or CallOptions()

    async def __call__(self, function: str, input: Any = NOTHING, /, **arguments: Any) -> Any:
        """Calls a function, as `call` does. If the task is cancelled, the callee is, too."""
        state = _state()
        return await _on_loop(state, _value(state, function, self._options, input, arguments))

    async def stream(self, function: str, input: Any = NOTHING, /, **arguments: Any) -> AsyncIterator[Any]:
        """Calls a function, and iterates the items of its answer as they come."""
        state = _state()
        items = _items(state, function, self._options, input, arguments)
        try:
            while (item := await _on_loop(state, _next(items))) is not _END:
                yield item
        finally:
            await _on_loop(state, items.aclose())  # type: ignore[attr-defined]  # an async generator

    def with_options(
        self,
        *,
        path: str | None = None,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        returns: Any = NOTHING,
    ) -> AsyncCall:
        """A handle with other options, as of `call`."""
        return AsyncCall(_changed(self._options, path, method, headers, timeout_s, returns))


call = Call()
"""Calls another function, see `Call`."""
acall = AsyncCall()
"""Calls another function from asynchronous code, see `AsyncCall`."""


def _changed(
    options: CallOptions,
    path: str | None,
    method: str | None,
    headers: Mapping[str, str] | None,
    timeout_s: float | None,
    returns: Any,
) -> CallOptions:
    given: dict[str, Any] = {"path": path, "method": method, "headers": headers, "timeout_s": timeout_s}
    changes = {name: value for name, value in given.items() if value is not None}
    return replace(options, **changes, **({} if returns is NOTHING else {"returns": returns}))


# ── the current call ───────────────────────────────────────────────────────────────────────────────


def _state() -> CallState:
    state = current.get()
    if state is None:
        raise RuntimeError(
            "no current call: call() and acall() work inside one call, not in load(), tests or batched handlers"
        )
    return state


def _wait(state: CallState, work: Coroutine[Any, Any, Value] | Awaitable[Value]) -> Value:
    """Runs the work on the worker's loop, from a thread. Errors: RuntimeError on that loop itself."""
    if _running_loop() is state.loop:
        if isinstance(work, Coroutine):
            work.close()
        raise RuntimeError("call() would block the event loop, on which this code runs: write `await acall(...)`")
    return asyncio.run_coroutine_threadsafe(_awaited(work), state.loop).result()


async def _on_loop(state: CallState, work: Awaitable[Value]) -> Value:
    """Runs the work on the worker's loop, also from a loop of the handler's own."""
    if _running_loop() is state.loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_awaited(work), state.loop))


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _awaited(work: Awaitable[Value]) -> Value:
    return await work


async def _next(items: AsyncIterator[Any]) -> Any:
    return await anext(items, _END)


# ── one call, on the worker's loop ─────────────────────────────────────────────────────────────────


async def _value(
    state: CallState, function: str, options: CallOptions, input: Any, arguments: Mapping[str, Any]
) -> Any:
    answer = await _sent(state, function, options, input, arguments)
    async with aclosing(answer):
        body = b"".join([piece async for piece in answer.pieces()])
    if not answer.kind.startswith(EVENTS):
        return decode_value(function, answer.kind, body, options.returns)
    reader = EventReader(function, options.returns)
    with_events = _read(function, lambda: [*reader.feed(body), *reader.end()])
    return [item for item, _ in with_events if item is not NO_ITEM]


async def _items(
    state: CallState, function: str, options: CallOptions, input: Any, arguments: Mapping[str, Any]
) -> AsyncIterator[Any]:
    answer = await _sent(state, function, options, input, arguments)
    reader = EventReader(function, options.returns)
    async with aclosing(answer):
        if not answer.kind.startswith(EVENTS):
            body = b"".join([piece async for piece in answer.pieces()])
            yield decode_value(function, answer.kind, body, options.returns)
            return
        async for piece in answer.pieces():
            for item, _ in _read(function, lambda piece=piece: reader.feed(piece)):
                if item is not NO_ITEM:
                    yield item
        for item, _ in _read(function, reader.end):
            if item is not NO_ITEM:
                yield item


def _read(function: str, read: Any) -> Any:
    """The items that `read` decodes. Errors: the callee's, marked as its."""
    try:
        return read()
    except FleetError as error:
        raise mark_callee(error, function) from None


class CallAnswer:
    """The answer of a call under way; closing it before its end cancels the call."""

    def __init__(self, link: Link, function: str, head: AnswerHead) -> None:
        self._link = link
        self._function = function
        self.status = head.status
        self.headers = {name.lower(): value for name, value in head.headers}
        self.kind = self.headers.get("content-type", "")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Errors: WorkerLost if the answer breaks off."""
        while True:
            try:
                piece = await self._link.receive()
            except LinkClosed as closed:
                if closed.code == COMPLETE:
                    return
                text = f"the answer of function {self._function} broke off"
                raise mark_callee(WorkerLost(text), self._function) from None
            yield piece if isinstance(piece, bytes) else piece.encode()

    async def aclose(self) -> None:
        self._link.close()


async def _sent(
    state: CallState, function: str, options: CallOptions, input: Any, arguments: Mapping[str, Any]
) -> CallAnswer:
    """Sends the call, and waits for the head of its answer. Errors: the callee's, TypeError for the input."""
    if state.ended:
        raise CallEnded(f"function {function} cannot be called: the call for which it would be has ended")
    if state.links is None or not state.grant:
        callee, _ = split_callee(function)
        raise CallNotDeclared(
            f"function {state.function} declares no functions that it calls, and calls {callee}",
            hint=f"deploy it with @function(calls=[{callee!r}])",
        )
    body, content_type = encode_input(input, arguments)
    request = _request(state, function, options, body, content_type)
    link = await state.links.take(state.grant.partition(":")[0])
    try:
        await link.send(msgspec.json.encode(request).decode())
        if body is not None:
            await link.send(body)
        answer = CallAnswer(link, function, msgspec.json.decode(await link.receive(), type=AnswerHead))
        if answer.status >= 400:
            content = b"".join([piece async for piece in answer.pieces()])
            raise_for(function, answer.status, answer.headers, content)
        return answer
    except LinkClosed as closed:
        link.close()
        raise mark_callee(_lost(function, closed.code), function) from None
    except FleetError as error:
        link.close()
        raise mark_callee(error, function) from None
    except BaseException:
        link.close()
        raise


def _lost(function: str, code: int) -> FleetError:
    if code == TOO_BIG:
        return TooLarge(f"the input of function {function} has more bytes than its gateway takes")
    return CallEnded(f"the call of function {function} was cancelled, because the call for which it was made has ended")


def _request(
    state: CallState, function: str, options: CallOptions, body: bytes | None, content_type: str
) -> CallRequest:
    callee, version = split_callee(function)
    path = options.path if options.path.startswith("/") or not options.path else f"/{options.path}"
    path = quote(path, safe=_URL)
    headers = [(name.lower(), value) for name, value in options.headers.items()]
    if content_type and not any(name == "content-type" for name, _ in headers):
        headers.append(("content-type", content_type))
    key = hashlib.sha256(f"{function}\0{path}\0".encode() + (body or b"")).digest()
    return CallRequest(
        grant=state.grant.partition(":")[2],
        function=callee,
        version=version,
        method=(options.method or ("POST" if body is not None or not path else "GET")).upper(),
        path=path or "/",
        headers=headers,
        timeout_s=options.timeout_s,
        number=state.count_call(key),
        has_body=body is not None,
    )
