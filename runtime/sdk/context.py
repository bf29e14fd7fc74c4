"""Context of the current call: `from fleetstart.runtime import context`.

Each call has one `CallState`, carried by a ContextVar to its task, its thread, and whatever is started from there.
Values are computed on first access.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar

from ..contract.worker_headers import (
    ATTEMPT_HEADER,
    CONTINUE_HEADER,
    DEADLINE_HEADER,
    GRANT_HEADER,
    PROGRESS_HEADER,
    REQUEST_HEADER,
    TOKEN_HEADER,
)
from ..worker_io.asgi import App, Receive, Scope, Send
from ..worker_io.call_links import CallLinks

_OURS = frozenset(
    name.encode()
    for name in (TOKEN_HEADER, DEADLINE_HEADER, CONTINUE_HEADER, ATTEMPT_HEADER, PROGRESS_HEADER, GRANT_HEADER)
)
LOGGED_EVERY_S = 1.0
"""Interval of progress lines in the log; a listening caller gets every report."""


class Headers(Mapping[str, str]):
    """Request headers, case-insensitive. Repeated headers are joined by commas, as HTTP defines."""

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
    """State of one running call."""

    def __init__(self, scope: Scope, function: str, version: int, links: CallLinks | None = None) -> None:
        """`links`: over which it may call other functions; None if it may call none."""
        self.function = function
        self.version = version
        self.links = links
        self.ended = False
        self._raw: list[tuple[bytes, bytes]] = scope["headers"]
        self._began_s = time.monotonic()
        self._headers: Headers | None = None
        self.loop = asyncio.get_running_loop()
        self._calls: Counter[bytes] = Counter()
        self._receive: Receive | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._logged_s = -math.inf
        self.gone = False
        self.on_progress: Callable[[float, str], None] | None = None
        """Receiver of progress reports, called from any thread; None if the caller does not listen."""

    @property
    def id(self) -> str:
        return self._own(REQUEST_HEADER)

    @property
    def attempt(self) -> int:
        text = self._own(ATTEMPT_HEADER)
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 1

    @property
    def grant(self) -> str:
        """Its right to call other functions, as `GATEWAY:SECRET`."""
        return self._own(GRANT_HEADER)

    def count_call(self, key: bytes) -> int:
        """Counts a call of another function; returns how many equal ones there were before. On the loop only."""
        self._calls[key] += 1
        return self._calls[key] - 1

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
        """True if the client has gone or the deadline passed; from any thread. First use starts watching the client."""
        if self._watcher is None and self._receive is not None:
            self.loop.call_soon_threadsafe(self.watch)
        return self.gone or self.remaining_s == 0.0

    def progress(self, fraction: float, message: str) -> None:
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"progress({fraction!r}): the fraction is 0 to 1")
        # numpy's and torch's numbers compare as numbers, but have no JSON form.
        fraction, message = float(fraction), str(message)
        if self.on_progress is not None:
            self.on_progress(fraction, message)
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOGGED_EVERY_S or fraction == 1.0:
            self._logged_s = now_s
            sys.stdout.write(f"progress {fraction:.0%}{': ' if message else ''}{message}\n")
            sys.stdout.flush()

    def body_was_read(self, receive: Receive) -> None:
        """Marks the body as read: the only message still to come is the client's disconnect."""
        self._receive = receive

    def watch(self) -> asyncio.Task[None]:
        """Task that ends when the client disconnects; call it on the loop."""
        if self._watcher is None:
            self._watcher = self.loop.create_task(self._until_gone())
        return self._watcher

    def end(self) -> None:
        """Stops watching the client; from now on it calls no other functions."""
        self.ended = True
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
    """The current call, for code that serves it, in tasks and threads alike: `context.remaining_s`.

        @function
        def render(frames: int) -> str:
            for number in range(frames):
                if context.cancelled:
                    break
                context.progress(number / frames, f"frame {number}")

    Raises:
        RuntimeError: Outside a call: in `load`, in a test, and in a batched handler, which serves many calls at once.
    """

    @property
    def id(self) -> str:
        """Invocation id: the `X-Request-Id` of the response."""
        return _call().id

    @property
    def function(self) -> str:
        """Name of the function."""
        return _call().function

    @property
    def version(self) -> int:
        """Version number of the function."""
        return _call().version

    @property
    def attempt(self) -> int:
        """Number of this attempt, from 1; higher if earlier attempts lost their worker."""
        return _call().attempt

    @property
    def headers(self) -> Mapping[str, str]:
        """Request headers; names are case-insensitive."""
        return _call().headers

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline, at least 0; None without a deadline."""
        return _call().remaining_s

    @property
    def cancelled(self) -> bool:
        """Checks whether the client has disconnected or the deadline has passed.

        A handler in a thread should check it now and then, and return; asynchronous code is cancelled anyway. An ASGI
        app receives the disconnect itself, and sees only the deadline here.
        """
        return _call().cancelled

    def progress(self, fraction: float, message: str = "") -> None:
        """Reports progress to a caller that accepts `text/event-stream`, and once a second to the log.

        Args:
            fraction: Progress from 0 to 1.
            message: Text for people.

        Raises:
            ValueError: For a fraction below 0 or above 1.
        """
        _call().progress(fraction, message)


context = Context()
"""The current call, see `Context`."""


def _call() -> CallState:
    call = current.get()
    if call is None:
        raise RuntimeError("no current call: context works inside one call, not in load(), tests or batched handlers")
    return call


def with_context(app: App, function: str, version: int, links: CallLinks | None = None) -> App:
    """Wraps an ASGI app so that `context` works in it, and `call` with `links`."""

    async def with_call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
            return
        call = CallState(scope, function, version, links)
        token = current.set(call)
        try:
            await app(scope, receive, send)
        finally:
            call.end()
            current.reset(token)

    return with_call


def current_call(scope: Scope) -> CallState:
    """The current call, or a new one for an app that runs without `with_context`."""
    return current.get() or CallState(scope, "", 0)
