"""Two engines of one model: the first answers at once, the second takes its requests over when it has come up.

The second one is built in a thread of its own, and only once the first one has given a token: until then nothing may
slow that. Then running requests move, between two steps, by their tokens: these are the whole state of a request, as
for a stream that goes on at another worker. A few move at a time, so that no stream pauses for the prompts of all;
those that are nearly done end where they are. If the second engine does not come up, the first one goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import msgspec

from ...contract.errors import FleetError, InvalidInput
from ...contract.node.orders import SecondEngine
from .capture_gate import GATE
from .generation import Request, ResumeState, TokenDelta
from .inference_engine import EngineLoad, InferenceEngine, never

logger = logging.getLogger(__name__)

QUIET_S = 2.0
"""Time without a call after which the second engine is built all the same: a worker that was started ahead of calls."""
WAIT_MOST_S = 30.0
"""Longest wait for first tokens: where calls come without a pause, some request always waits for its own."""
WORTH_TOKENS = 16
"""Least remaining tokens of a request that moves: a shorter one ends before it would have been computed anew."""
MOVED_TOKENS = 512
"""Tokens that are computed anew at a time, of one request at least: those of the others wait meanwhile."""
ERROR_MAX = 500
"""Longest text of why it did not come up: it stands in the worker's status."""
SWITCH_S = 0.0005
"""Python's switch interval while the second engine is built. A step of the first one asks for the interpreter a few
times, and each time may wait that long."""


@dataclass(slots=True)
class _Running:
    """A request and all its output tokens."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    stays: bool = False
    """True if the second engine has refused it."""


class TwoEngines:
    """An `InferenceEngine` over two. Not thread-safe, except `check`, `resume`, `context_tokens`, `load` and
    `second`."""

    def __init__(
        self,
        first: InferenceEngine,
        build: Callable[[], InferenceEngine],
        *,
        name: str,
        embeds: bool,
        quiet_s: float = QUIET_S,
        taken: Callable[[], None] = lambda: None,
    ) -> None:
        """`build` makes the second engine, `name`; `embeds`: whether that one computes embeddings; `taken` is called
        in the engines' thread before that one's first step."""
        self._first: InferenceEngine | None = first
        self._second: InferenceEngine | None = None
        self._build = build
        self._embeds = embeds
        self._taken = taken
        self._quiet_s = quiet_s
        self._running: dict[int, _Running] = {}
        """Requests of the first engine."""
        self._counted: set[int] = set()
        """Requests that moved after their first token, which had their prompt's cached tokens, until their next one."""
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._built: InferenceEngine | None = None
        """The second engine until it takes requests; under the lock, like the two below."""
        self._released = False
        self._closed = False
        self._begin = threading.Event()
        self._state = SecondEngine(engine=name)
        self._ended = threading.Event()
        work = [self._build_second]
        self._builder = threading.Thread(
            target=_run_and_stay, args=(work, self._ended), name="llm-second-engine", daemon=True
        )
        self._builder.start()

    # ── which engine has what ──────────────────────────────────────────────────────────────────────

    @property
    def second(self) -> SecondEngine:
        """State of the second engine; from any thread."""
        return self._state

    @property
    def _newest(self) -> InferenceEngine:
        """The engine that gets new requests."""
        engine = self._second or self._first
        assert engine is not None
        return engine

    @property
    def _engines(self) -> list[InferenceEngine]:
        return [engine for engine in (self._first, self._second) if engine is not None]

    @property
    def context_tokens(self) -> int:
        return self._newest.context_tokens

    @property
    def load(self) -> EngineLoad:
        newest = self._newest.load
        first = self._first
        if first is None or self._second is None:
            return newest
        return replace(newest, active=newest.active + first.load.active)

    @property
    def idle(self) -> bool:
        return all(engine.idle for engine in self._engines)

    @property
    def stalled(self) -> bool:
        return all(engine.idle or engine.stalled for engine in self._engines)

    @property
    def stages(self) -> int:
        return self._newest.stages

    def check(self, request: Request) -> None:
        if request.embeds and not self._embeds:
            raise InvalidInput(
                "this function's engine generates and gives no embeddings",
                hint='serve them with engine="native", or with Transformers(task="embedding")',
            )
        self._newest.check(request)

    def resume(self, request: Request, tokens: list[int]) -> ResumeState:
        return self._newest.resume(request, tokens)

    # ── requests ───────────────────────────────────────────────────────────────────────────────────

    def add(self, request: Request, id: int | None = None) -> int:
        id = next(self._ids) if id is None else id
        self._take_second()
        second, first = self._second, self._first
        if second is not None:
            try:
                second.check(request)
            except FleetError:  # checked by the first engine, before this one was taken
                if first is None:
                    raise
            else:
                return second.add(request, id)
        assert first is not None
        before = request.resume.tokens if request.resume is not None else []
        self._running[id] = _Running(request, list(before), stays=second is not None)
        return first.add(request, id)

    def cancel(self, id: int) -> None:
        self._running.pop(id, None)
        self._counted.discard(id)
        for engine in self._engines:
            engine.cancel(id)

    def step(self, now_ns: int = 0, awaited: Callable[[], bool] = never) -> list[TokenDelta]:
        self._take_second()
        deltas: list[TokenDelta] = []
        if self._first is not None:
            if self._second is not None and not self._released:
                self._move_some(self._first, self._second)
            deltas += self._note(self._first.step(now_ns, awaited))
            self._end_first()
        if self._second is not None:
            deltas += map(self._count_once, self._second.step(now_ns, awaited))
        return deltas

    def fail_all(self, error: FleetError) -> list[TokenDelta]:
        self._running.clear()
        self._counted.clear()
        return [delta for engine in self._engines for delta in engine.fail_all(error)]

    def _note(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Keeps the tokens of the first engine's requests; once all have some, the second engine is built."""
        for delta in deltas:
            if delta.last:
                self._running.pop(delta.id, None)
            elif (running := self._running.get(delta.id)) is not None:
                running.tokens += delta.tokens
        if deltas and all(running.tokens for running in self._running.values()):
            self._begin.set()
        return deltas

    def _count_once(self, delta: TokenDelta) -> TokenDelta:
        """The delta of the second engine, without cached tokens if the first engine has given the request's."""
        if delta.id not in self._counted:
            return delta
        self._counted.discard(delta.id)
        return replace(delta, cached_tokens=0)

    # ── hand-over ──────────────────────────────────────────────────────────────────────────────────

    def _take_second(self) -> None:
        """Takes the second engine for new requests, once it is built."""
        if self._second is not None or self._built is None:
            return
        with self._lock:
            self._second, self._built = self._built, None
        self._taken()
        self._say(state="running")

    def _move_some(self, first: InferenceEngine, second: InferenceEngine) -> None:
        """Moves the next requests to the second engine."""
        moved = 0
        for id, running in list(self._running.items()):
            if running.stays or running.request.max_new_tokens - len(running.tokens) < WORTH_TOKENS:
                continue
            tokens = len(running.request.tokens) + len(running.tokens)
            if moved and moved + tokens > MOVED_TOKENS:
                return
            moved += tokens
            self._move(id, running, first, second)

    def _move(self, id: int, running: _Running, first: InferenceEngine, second: InferenceEngine) -> None:
        """Moves one request; what the second engine refuses stays with the first one."""
        request = replace(running.request, resume=None)
        try:
            second.check(request)
            state = second.resume(request, running.tokens)
        except FleetError as error:
            logger.warning("a request stays with the first engine", extra={"error": str(error)})
            running.stays = True
            return
        first.cancel(id)
        del self._running[id]
        if running.tokens:
            self._counted.add(id)
        second.add(replace(request, resume=state), id)
        self._say(moved=self._state.moved + 1)

    def _end_first(self) -> None:
        """Frees the first engine once the second one has all requests."""
        if self._first is not None and self._second is not None and self._first.idle:
            first, self._first = self._first, None
            self._running.clear()
            first.release()
            first.close()
            logger.info("the second engine has all requests", extra={"engine": self._state.engine})

    # ── weights ────────────────────────────────────────────────────────────────────────────────────

    def release(self) -> list[TokenDelta]:
        with self._lock:
            self._released = True
            engines = self._all()
        deltas: list[TokenDelta] = []
        for engine in engines:
            given = engine.release()
            deltas += self._note(given) if engine is self._first else map(self._count_once, given)
        return deltas

    def regain(self) -> None:
        with self._lock:
            self._released = False
            engines = self._all()
        for engine in engines:
            engine.regain()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            engines = self._all()
        self._begin.set()
        self._ended.set()
        for engine in engines:
            engine.close()

    def _all(self) -> list[InferenceEngine]:
        """The engines, and the one that waits to be taken; under the lock."""
        return [*self._engines, *([self._built] if self._built is not None else [])]

    # ── the second engine's thread ─────────────────────────────────────────────────────────────────

    def _build_second(self) -> None:
        created_ns = time.monotonic_ns()
        while not self._begin.wait(self._quiet_s):
            if not self._running or time.monotonic_ns() - created_ns > WAIT_MOST_S * 1e9:
                break
        if self._closed:
            return
        began_ns = time.monotonic_ns()
        self._say(state="starting", waited_ms=(began_ns - created_ns) // 1_000_000)
        try:
            with GATE.building(), _switching_often():
                engine = self._build()
        except Exception as error:
            logger.exception("the second engine does not come up, the first one goes on")
            said = error.message if isinstance(error, FleetError) else f"{type(error).__name__}: {error}"
            self._say(state="failed", took_ms=(time.monotonic_ns() - began_ns) // 1_000_000, error=said[:ERROR_MAX])
            return
        took_ms = (time.monotonic_ns() - began_ns) // 1_000_000
        logger.info("the second engine is up", extra={"engine": self._state.engine, "took_ms": took_ms})
        with self._lock:
            if self._closed:
                engine.close()
                return
            if self._released:
                engine.release()
            self._say(state="ready", took_ms=took_ms)  # first: after the next line the engines' thread says what is
            self._built = engine

    def _say(self, **changes: object) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)


def _run_and_stay(work: list[Callable[[], None]], ended: threading.Event) -> None:
    """Runs the one function of the list, and keeps the thread, but not what the function knows.

    libgomp's threads spin for milliseconds while they wait for one another, unless more of them live than there are
    cores. The builder's would end with it, and those of the engines' thread would spin: where others used the cores,
    too, a token of vLLM took eight times as long as with vLLM alone, whose builder stays.
    """
    work.pop()()
    ended.wait()


@contextlib.contextmanager
def _switching_often() -> Iterator[None]:
    """Lets threads that wait for the interpreter have it sooner."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
