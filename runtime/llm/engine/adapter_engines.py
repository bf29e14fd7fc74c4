"""Engines of one model with named adapters: an engine for the base and one for each adapter that requests have named.

The adapters' weights are views of the base's, but for the matrices that they change, so an engine more costs these and
its share of the KV memory. It is built in a thread of its own at the first request that names it; that one waits, and
those of other adapters do not. Sequences of one adapter are decoded together, adapters one after the other. Engines
that know adapters by themselves (vLLM) need none of this.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Collection

from ...contract.errors import DeadlineExceeded, FleetError, HandlerFailed, InvalidInput
from .generation import Request, ResumeState, TokenDelta
from .inference_engine import EngineLoad, InferenceEngine, never

logger = logging.getLogger(__name__)


class AdapterEngines:
    """An `InferenceEngine` over one of each adapter. Not thread-safe, except `check`, `resume`, `context_tokens` and
    `load`."""

    def __init__(
        self, base: InferenceEngine, build: Callable[[str], InferenceEngine], adapters: Collection[str]
    ) -> None:
        """`build` makes the engine of an adapter, in any thread; `base` is that of requests without one."""
        self._base = base
        self._build = build
        self._adapters = frozenset(adapters)
        self._engines: dict[str, InferenceEngine] = {"": base}
        self._ids = itertools.count()
        self._adapter_of: dict[int, str] = {}
        self._waiting: dict[int, Request] = {}
        """Requests whose engine is being built or not taken yet."""
        self._one_at_a_time = threading.Lock()
        """Held while an engine is built: transformers patches modules of torch meanwhile, for all threads."""
        self._lock = threading.Lock()
        self._built: dict[str, InferenceEngine | FleetError] = {}
        """Engines, or why there is none, that are not taken yet; under the lock, like the two below."""
        self._building: set[str] = set()
        self._closed = False
        self._released = False

    @property
    def context_tokens(self) -> int:
        return self._base.context_tokens

    @property
    def load(self) -> EngineLoad:
        loads = [engine.load for engine in list(self._engines.values())]
        return EngineLoad(
            active=sum(load.active for load in loads) + len(self._waiting),
            migrated_in=sum(load.migrated_in for load in loads),
            prompt_tokens=sum(load.prompt_tokens for load in loads),
            cached_tokens=sum(load.cached_tokens for load in loads),
            free_blocks=sum(load.free_blocks for load in loads),
            block_count=sum(load.block_count for load in loads),
        )

    @property
    def idle(self) -> bool:
        return not self._waiting and all(engine.idle for engine in self._engines.values())

    @property
    def stalled(self) -> bool:
        return all(engine.idle or engine.stalled for engine in self._engines.values())

    @property
    def stages(self) -> int:
        return 1

    def check(self, request: Request) -> None:
        if request.adapter and request.adapter not in self._adapters:
            known = ", ".join(sorted(self._adapters))
            raise InvalidInput(f"there is no adapter {request.adapter!r}", hint=f"there are {known}")
        self._base.check(request)

    def resume(self, request: Request, tokens: list[int]) -> ResumeState:
        return self._base.resume(request, tokens)

    def add(self, request: Request, id: int | None = None) -> int:
        id = next(self._ids) if id is None else id
        self._adapter_of[id] = request.adapter
        if (engine := self._engines.get(request.adapter)) is not None:
            return engine.add(request, id)
        self._waiting[id] = request
        with self._lock:
            if request.adapter not in self._building:
                self._building.add(request.adapter)
                name = f"llm-adapter-{request.adapter}"[:15]
                threading.Thread(target=self._build_one, args=(request.adapter,), name=name, daemon=True).start()
        return id

    def cancel(self, id: int) -> None:
        self._waiting.pop(id, None)
        if (engine := self._engines.get(self._adapter_of.pop(id, ""))) is not None:
            engine.cancel(id)

    def step(self, now_ns: int = 0, awaited: Callable[[], bool] = never) -> list[TokenDelta]:
        deltas = [*self._take_built(), *self._expire(now_ns)]
        for engine in self._engines.values():
            if not engine.idle:
                deltas += engine.step(now_ns, awaited)
        return self._forget(deltas)

    def _forget(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """The deltas; the requests that end with them have no adapter any more."""
        for delta in deltas:
            if delta.last:
                self._adapter_of.pop(delta.id, None)
        return deltas

    def fail_all(self, error: FleetError) -> list[TokenDelta]:
        deltas = [TokenDelta(id=id, error=error) for id in self._waiting]
        self._waiting.clear()
        self._adapter_of.clear()
        return deltas + [delta for engine in self._engines.values() for delta in engine.fail_all(error)]

    def release(self) -> list[TokenDelta]:
        with self._lock:
            self._released = True
            engines = self._all()
        return self._forget([delta for engine in engines for delta in engine.release()])

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
            self._built.clear()
        for engine in engines:
            engine.close()

    def _all(self) -> list[InferenceEngine]:
        """The engines, and those that wait to be taken; under the lock."""
        return [*self._engines.values(), *(one for one in self._built.values() if not isinstance(one, FleetError))]

    def _take_built(self) -> list[TokenDelta]:
        """Takes engines that have come up, and their requests; deltas of those whose engine did not. Called by steps
        alone, which give the deltas out."""
        if not self._built:
            return []
        with self._lock:
            built, self._built = self._built, {}
            self._building -= built.keys()
        deltas = []
        for adapter, engine in built.items():
            ids = [id for id, request in self._waiting.items() if request.adapter == adapter]
            if isinstance(engine, FleetError):
                deltas += [TokenDelta(id=id, error=engine) for id in ids]
                for id in ids:
                    del self._waiting[id]
                continue
            self._engines[adapter] = engine
            for id in ids:
                engine.add(self._waiting.pop(id), id)
        return deltas

    def _expire(self, now_ns: int) -> list[TokenDelta]:
        late = [id for id, one in self._waiting.items() if one.deadline_ns is not None and now_ns >= one.deadline_ns]
        error = DeadlineExceeded("the deadline passed while the adapter was loaded", hint="call again: it stays loaded")
        for id in late:
            del self._waiting[id]
        return [TokenDelta(id=id, error=error) for id in late]

    def _build_one(self, adapter: str) -> None:
        built: InferenceEngine | FleetError
        try:
            with self._one_at_a_time:
                built = self._build(adapter)
        except FleetError as error:
            built = error
        except Exception as error:
            logger.exception("an adapter cannot be loaded", extra={"adapter": adapter})
            built = HandlerFailed(f"adapter {adapter} cannot be loaded: {error!r}")
        with self._lock:
            if not self._closed:
                if self._released and not isinstance(built, FleetError):
                    built.release()  # a step that takes it may not come before `regain`
                self._built[adapter] = built
                return
        if not isinstance(built, FleetError):
            built.close()
