"""The call that a handler is in: `from fleetstart.runtime import context`.

Each call of a worker has one `CallState`, which a ContextVar carries to wherever the handler's code runs: its task, its
thread, whatever it starts from there. Nothing is worked out before somebody asks for it.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar

from ..contract.worker_headers import (
    ATTEMPT_HEADER,
    CONTINUE_HEADER,
    DEADLINE_HEADER,
    PROGRESS_HEADER,
    REQUEST_HEADER,
    TOKEN_HEADER,
)
from ..worker_io.asgi import App, Receive, Scope, Send

_OURS = frozenset(
    name.encode() for name in (TOKEN_HEADER, DEADLINE_HEADER, CONTINUE_HEADER, ATTEMPT_HEADER, PROGRESS_HEADER)
)
LOGGED_EVERY_S = 1.0
"""Progress goes to whoever listens as it comes, and to the log once a second."""


class Headers(Mapping[str, str]):
    """Of a request; names in any case. A header that stands twice is joined by commas, as HTTP reads it."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        self._values: dict[str, str] = {}
        for name, value in raw:
            if name not in _OURS:
                key, text = name.decode("latin-1"), value.decode("latin-1")
                self._values[key] = f"{self._values[key]}, {text}" if key in self._values else text

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class CallState:
    """One call under way in this worker."""

    def __init__(self, scope: Scope, function: str, version: int) -> None:
        self.function = function
        self.version = version
        self._raw: list[tuple[bytes, bytes]] = scope["headers"]
        self._began_s = time.monotonic()
        self._headers: Headers | None = None
        self._loop = asyncio.get_running_loop()
        self._receive: Receive | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._logged_s = -math.inf
        self.gone = False
        self.tell: Callable[[float, str], None] | None = None
        """Where progress goes; for any thread."""

    @property
    def id(self) -> str:
        return self._own(REQUEST_HEADER)

    @property
    def attempt(self) -> int:
        text = self._own(ATTEMPT_HEADER)
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 1

    @property
    def headers(self) -> Headers:
        if self._headers is None:
            self._headers = Headers(self._raw)
        return self._headers

    @property
    def remaining_s(self) -> float | None:
        try:
            left_ms = float(self._own(DEADLINE_HEADER))
        except ValueError:
            return None
        return max(0.0, self._began_s + left_ms / 1e3 - time.monotonic()) if math.isfinite(left_ms) else None

    @property
    def cancelled(self) -> bool:
        """From any thread. Who asks for the first time makes the call look out for its client."""
        if self._watcher is None and self._receive is not None:
            self._loop.call_soon_threadsafe(self.watch)
        return self.gone or self.remaining_s == 0.0

    def progress(self, fraction: float, message: str) -> None:
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"progress({fraction!r}): the fraction is 0 to 1")
        if self.tell is not None:
            self.tell(fraction, message)
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOGGED_EVERY_S or fraction == 1.0:
            self._logged_s = now_s
            sys.stdout.write(f"progress {fraction:.0%}{': ' if message else ''}{message}\n")
            sys.stdout.flush()

    def body_was_read(self, receive: Receive) -> None:
        """What comes from now on can only be the client's leaving."""
        self._receive = receive

    def watch(self) -> asyncio.Task[None]:
        """On the loop. The task ends when the client has gone."""
        if self._watcher is None:
            self._watcher = self._loop.create_task(self._until_gone())
        return self._watcher

    def ended(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self._receive = None

    async def _until_gone(self) -> None:
        receive = self._receive
        if receive is None:
            return
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True

    def _own(self, header: str) -> str:
        wanted = header.encode()
        return next((value.decode("latin-1") for name, value in self._raw if name == wanted), "")


current: ContextVar[CallState | None] = ContextVar("call", default=None)


class Context:
    """The call under way, for the code that serves it, in tasks and threads alike.

    Errors: RuntimeError outside a call: in `load`, in a test, and in a batched handler, which serves many at once.
    """

    @property
    def id(self) -> str:
        """Of the invocation: the X-Request-Id of its answer."""
        return _call().id

    @property
    def function(self) -> str:
        return _call().function

    @property
    def version(self) -> int:
        return _call().version

    @property
    def attempt(self) -> int:
        """1, or more if workers were lost under this call before."""
        return _call().attempt

    @property
    def headers(self) -> Mapping[str, str]:
        """Of the request, names in any case."""
        return _call().headers

    @property
    def remaining_s(self) -> float | None:
        """Seconds until nobody waits for the answer any more; None without a deadline."""
        return _call().remaining_s

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits any more: the client has gone, or the deadline has passed.

        A thread should look now and then and return; asynchronous code is cancelled anyway. In an ASGI app the client's
        leaving is for the app to receive, and this tells of the deadline alone.
        """
        return _call().cancelled

    def progress(self, fraction: float, message: str = "") -> None:
        """How far the call is, 0 to 1: for a caller that accepts text/event-stream, and for the log.

        Errors: ValueError for a fraction that is none.
        """
        _call().progress(fraction, message)


context = Context()


def _call() -> CallState:
    call = current.get()
    if call is None:
        raise RuntimeError("there is no one call here: context is for code that serves a call, and for one at a time")
    return call


def with_context(app: App, function: str, version: int) -> App:
    """The app, with `context` for whatever it runs."""

    async def with_call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
            return
        call = CallState(scope, function, version)
        token = current.set(call)
        try:
            await app(scope, receive, send)
        finally:
            call.ended()
            current.reset(token)

    return with_call


def current_call(scope: Scope) -> CallState:
    """The call under way, or one for whoever runs an app without `with_context`."""
    return current.get() or CallState(scope, "", 0)
