"""Engine service: runs the engine in a thread; requests go in through a queue, deltas come out as streams.

The reader of a stream owns its requests: leaving the `async with` cancels unfinished ones, so a client that disconnects
frees its blocks before the next step.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType

from ...contract.errors import FleetError, HandlerFailed, Unavailable
from ...contract.node.speed import Speed
from ..engine.engine import Engine
from ..engine.generation import Request, TokenDelta
from ..engine.inference_engine import EngineLoad, InferenceEngine
from ..engine.latency_stats import LatencyStats

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""Wait for the thread, longer than any step; a thread that is still busy ends with its process."""
CHANGE_POLL_S = 1.0
"""Interval in which a release or a regain looks whether the engine was closed meanwhile."""
STALLED_S = 0.02
"""Interval of deadline checks while nothing can be computed."""


@dataclass(frozen=True, slots=True)
class _Add:
    id: int
    request: Request


@dataclass(frozen=True, slots=True)
class _Cancel:
    id: int


@dataclass(frozen=True, slots=True)
class _Run:
    """A function to run in the engine's thread; returns deltas."""

    act: Callable[[Engine], list[TokenDelta]]


@dataclass(frozen=True, slots=True)
class _Change:
    """A release of the engine's weights, or the end of one, between two steps; returns deltas."""

    change: Callable[[], list[TokenDelta]]
    done: Future[None]


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Command = _Add | _Cancel | _Run | _Change | _Close


class DeltaStream:
    """Deltas of one call's requests as (index of the request, delta), until each has ended."""

    def __init__(self, service: EngineService, ids: list[int]) -> None:
        self._service = service
        self._index = {id: index for index, id in enumerate(ids)}
        self._deltas: asyncio.Queue[TokenDelta] = asyncio.Queue()

    def put(self, delta: TokenDelta) -> None:
        """Adds a delta; on the loop."""
        self._deltas.put_nowait(delta)

    async def __aenter__(self) -> DeltaStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._service.abandon(list(self._index))

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> tuple[int, TokenDelta]:
        """The next delta. Errors: the one that ended a request."""
        if not self._index:
            raise StopAsyncIteration
        delta = await self._deltas.get()
        index = self._index[delta.id]
        if delta.last:
            del self._index[delta.id]
        if delta.error is not None:
            raise delta.error
        return index, delta


class EngineService:
    """The engine in its thread. Used from one event loop; `do`, `load`, `speed`, `release`, `regain` and `close` may be
    used from any thread."""

    def __init__(self, engine: InferenceEngine, *, prepare: Callable[[], None] | None = None) -> None:
        """`prepare` runs first in the thread, for per-thread settings."""
        self._engine = engine
        self._prepare = prepare
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._streams: dict[int, DeltaStream] = {}
        self._ids = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._speeds = LatencyStats()
        self._thread = threading.Thread(target=self._run, name="llm-engine", daemon=True)
        self._thread.start()

    @property
    def active_count(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    @property
    def load(self) -> EngineLoad:
        """Requests and KV blocks of the engine; from any thread."""
        return self._engine.load

    def speed(self) -> Speed | None:
        """Mean latencies of recent requests; None until one has ended. From any thread."""
        return self._speeds.mean

    def open(self, requests: list[Request]) -> DeltaStream:
        """Starts the requests. Errors: InvalidInput if one can never be finished, Unavailable once closed."""
        if self._closed:
            raise Unavailable("the engine is closed", retry_after_s=0)
        for request in requests:
            self._engine.check(request)
        self._loop = asyncio.get_running_loop()
        ids = [next(self._ids) for _ in requests]
        stream = DeltaStream(self, ids)
        for id, request in zip(ids, requests, strict=True):
            self._streams[id] = stream
            self._commands.put(_Add(id, request))
        if self._closed:  # closed meanwhile: the thread may have stopped reading commands before these
            self.abandon(ids)
            raise Unavailable("the engine is closed", retry_after_s=0)
        return stream

    def abandon(self, ids: list[int]) -> None:
        """Cancels requests that have not ended."""
        for id in ids:
            if self._streams.pop(id, None) is not None:
                self._commands.put(_Cancel(id))

    def do(self, act: Callable[[Engine], list[TokenDelta]]) -> None:
        """Schedules a function in the engine's thread, between two steps. From any thread. Of pipelines and migrations,
        whose engine is the native one."""
        self._commands.put(_Run(act))

    def release(self) -> None:
        """Frees weights and KV memory (standby); returns when they are free. From any thread but the loop's; requests
        that come wait for `regain`. Errors: those of the engine; Unavailable once closed."""
        self._change(self._engine.release)

    def regain(self) -> None:
        """Takes weights and KV memory again; returns when steps can run. Errors: those of loading; as of `release`."""
        self._change(self._regain)

    def _regain(self) -> list[TokenDelta]:
        self._engine.regain()
        return []

    def _change(self, change: Callable[[], list[TokenDelta]]) -> None:
        done: Future[None] = Future()
        self._commands.put(_Change(change, done))
        while not self._closed:
            try:
                return done.result(CHANGE_POLL_S)
            except TimeoutError:
                if done.done():  # the change's own error
                    raise
        raise Unavailable("the engine is closed", retry_after_s=0)

    def close(self) -> None:
        """Ends every request with Unavailable, and the thread; waits for the running step."""
        self._closed = True
        self._commands.put(_Close())
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            if self._prepare is not None:
                self._prepare()
            while self._execute_commands():
                self._record(self._engine.step(time.monotonic_ns(), self._awaited))
        except Exception as error:
            # A bug: fail all waiting requests, which would wait forever otherwise.
            logger.exception("the engine's thread failed")
            self._closed = True
            self._fail_all(HandlerFailed(f"the engine failed: {error!r}"))
        else:
            self._fail_all(Unavailable("the worker is shutting down", retry_after_s=0))
        finally:
            self._engine.close()

    def _awaited(self) -> bool:
        return not self._commands.empty()

    def _fail_all(self, error: FleetError) -> None:
        deltas = self._engine.fail_all(error)
        while True:  # commands after the close
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if isinstance(command, _Add):
                deltas.append(TokenDelta(id=command.id, error=error))
        self._publish(deltas)

    def _execute_commands(self) -> bool:
        """Executes queued commands, waiting if the engine is idle; False after a close."""
        wait = self._engine.idle or self._engine.stalled
        while True:
            try:
                command = self._commands.get(wait, None if self._engine.idle else STALLED_S)
            except queue.Empty:
                return True
            wait = False
            match command:
                case _Close():
                    return False
                case _Add(id=id, request=request):
                    self._add(id, request)
                case _Run(act=act):
                    assert isinstance(self._engine, Engine)
                    self._record(act(self._engine))
                case _Change(change=change, done=done):
                    try:
                        self._record(change())
                    except Exception as error:
                        done.set_exception(error)
                    else:
                        done.set_result(None)
                case _Cancel(id=id):
                    self._engine.cancel(id)
                    self._speeds.discard(id)

    def _add(self, id: int, request: Request) -> None:
        """Adds a request; if the engine does not take it, it alone ends with the reason. `open` has checked it, but an
        engine that has come up since then may have a smaller context."""
        try:
            self._engine.add(request, id)
        except Exception as error:
            if not isinstance(error, FleetError):
                logger.exception("a request cannot be added")
            self._engine.cancel(id)
            reason = error if isinstance(error, FleetError) else HandlerFailed(f"the engine failed: {error!r}")
            self._publish([TokenDelta(id=id, error=reason)])
        else:
            self._speeds.add(id, time.monotonic_ns(), self._engine.stages, len(request.tokens))

    def _record(self, deltas: list[TokenDelta]) -> None:
        self._speeds.record(deltas, time.monotonic_ns(), self._engine.stages)
        self._publish(deltas)

    def _publish(self, deltas: list[TokenDelta]) -> None:
        if not deltas or self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver, deltas)
        except RuntimeError:  # the loop is closed: no reader is left
            for delta in deltas:
                self._engine.cancel(delta.id)

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.id)
            if stream is None:
                continue  # abandoned
            if delta.last:
                del self._streams[delta.id]
            stream.put(delta)
