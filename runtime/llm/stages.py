"""A worker that has a stage: what it serves, its links, and how it grows into a whole worker.

`FirstStage` serves the function's routes like a worker with the whole model. `LaterStage` serves nobody but the
stages beside it, until it has grown. Both are made by `start` and told of connections and of growth by the shell.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from fleetstart.runtime.asgi import Receive, Scope, Send, respond_error
from fleetstart.runtime.contract.errors import FleetError, StartFailed, Unavailable
from fleetstart.runtime.contract.function import LLMSettings
from fleetstart.runtime.contract.messages import Speed
from fleetstart.runtime.llm.app import LLMApp
from fleetstart.runtime.llm.growth import Growth, Parts
from fleetstart.runtime.llm.lending import Borrower, Lender
from fleetstart.runtime.llm.loading import BLOCK_TOKENS, Builder, builder, load_model
from fleetstart.runtime.llm.pipeline import Pipeline
from fleetstart.runtime.llm.runner import Runner
from fleetstart.runtime.llm.stage_worker import StageWorker
from fleetstart.runtime.llm.weights import Weights
from fleetstart.runtime.pipeline.frames import Grown, LinkBroken
from fleetstart.runtime.pipeline.links import Links
from fleetstart.runtime.pipeline.part import StageOf

log = logging.getLogger(__name__)

FIRST_CALLS_S = 0.5
"""For calls that wait at the gateway: who has grown takes those first, and running requests only if there is room."""


class FirstStage:
    """Loads its layers; ready when all stages are, or, if one is lost on the way, when it has the whole model."""

    def __init__(self, weights: Weights, settings: LLMSettings, of: StageOf, *, name: str, threads: int) -> None:
        """Returns when its own layers are there. Errors: as of `load_model`."""
        self._of = of
        self._lock = threading.Lock()
        self._growth: Growth | None = None
        self._ended = threading.Event()
        self._failure: FleetError | None = None
        self._parts: Parts | None = None
        self._pipeline = Pipeline(of.stage.count, self._on_broken)
        self.links = Links(of.stage, of.secret, of.membership.listener, self._pipeline.on_frame, self._pipeline.on_lost)
        of.membership.adopt(self)
        built: list[Builder] = []
        model = load_model(weights, settings, threads=threads, runner=lambda one: self._runner(built, one))
        self.app = LLMApp(model, name=name)
        self._pipeline.on_lending = Lender(self.app.service, self._pipeline.send).on_frame
        self._parts = Parts(
            service=self.app.service,
            pipeline=self._pipeline,
            load=built[0].whole,
            cuts=of.stage.cuts,
            kv_bytes=built[0].kv_bytes,
            block_tokens=BLOCK_TOKENS,
        )

    def _runner(self, built: list[Builder], one: Builder) -> Runner:
        stage = self._of.stage
        built.append(one)
        self._pipeline.begin(self.links, one.decoder(stage.first, stage.end), one.config.hidden_size)
        return self._pipeline

    def connect(self, index: int, link: socket.socket) -> None:
        self.links.connect(index, link)

    def wait_until_ready(self) -> None:
        """Errors: StartFailed, and what kept it from growing."""
        pipeline = self._pipeline
        if pipeline.wait_until_loaded(self._left_s()):
            return
        if not pipeline.broken:
            stages = ", ".join(map(str, pipeline.missing()))
            raise StartFailed(f"stages {stages} of its pipeline did not get ready in time")
        self.grow()
        if not self._ended.wait(self._left_s()):
            raise StartFailed(f"its pipeline broke ({pipeline.broken}), and the rest of the model did not come in time")
        if self._failure is not None:
            raise self._failure

    def grow(self) -> None:
        """Takes the whole model in and the requests over. Once; again only after it failed."""
        with self._lock:
            if self._growth is not None or self._parts is None:
                return  # under way, done, or asked for before there is anything that could grow
            self._ended.clear()
            self._failure = None
            self._growth = Growth(self._parts, self._on_end)
            self._growth.start()

    def speed(self) -> Speed | None:
        return self.app.service.speed()

    def close(self) -> None:
        self.app.close()
        self.links.close()

    def _left_s(self) -> float:
        return max(0.0, (self._of.deadline_ns - time.monotonic_ns()) / 1e9)

    def _on_broken(self, why: str) -> None:
        """In a thread of the links; perhaps before its own layers are there, and then `wait_until_ready` sees it."""
        log.warning("a stage is lost, the first goes on alone", extra={"why": why})
        self._of.hurry()
        self.grow()

    def _on_end(self, error: FleetError | None) -> None:
        self._failure = error
        if error is None:
            self._of.whole()
        else:
            log.error("the stage could not grow", extra={"error": error.message})
            with self._lock:
                self._growth = None
            if self._pipeline.broken:
                self._of.end(f"its pipeline broke ({self._pipeline.broken}) and it cannot go on alone: {error.message}")
        self._ended.set()


class LaterStage:
    """Computes for its pipeline, and serves callers once it has grown: then it is a whole worker (scale up)."""

    def __init__(self, weights: Weights, settings: LLMSettings, of: StageOf, *, name: str, threads: int) -> None:
        """Returns when its layers are there. Errors: as of `load_model`."""
        self._of = of
        self._load: Callable[[], LLMApp] = lambda: LLMApp(load_model(weights, settings, threads=threads), name=name)
        self._lock = threading.Lock()
        self._growing = False
        self._whole: LLMApp | None = None
        self._closed = threading.Event()
        self._worker = StageWorker(self._on_end)
        self.links = Links(of.stage, of.secret, of.membership.listener, self._worker.on_frame, self._worker.on_lost)
        of.membership.adopt(self)
        self._built = builder(weights, settings, threads=threads, whole=False)
        self._decoder = self._built.decoder(of.stage.first, of.stage.end)

    def connect(self, index: int, link: socket.socket) -> None:
        self.links.connect(index, link)

    def wait_until_ready(self) -> None:
        """Errors: StartFailed if its links do not stand in time."""
        left_s = (self._of.deadline_ns - time.monotonic_ns()) / 1e9
        if not self.links.wait(max(0.0, left_s)):
            raise StartFailed(f"stage {self._of.stage.index}: no links to the other stages of its pipeline in time")
        self._worker.run(self.links, self._decoder, self._built.config.hidden_size)

    def grow(self) -> None:
        """Takes the whole model in beside what it does for its pipeline. Once; again only after it failed."""
        with self._lock:
            if self._growing:
                return
            self._growing = True
        threading.Thread(target=self._grow, name="llm-growth", daemon=True).start()

    def speed(self) -> Speed | None:
        """Once it has grown."""
        return self._whole.service.speed() if self._whole is not None else None

    def close(self) -> None:
        self._closed.set()
        self._worker.close()
        self.links.close()
        if self._whole is not None:
            self._whole.close()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._whole is not None:
            await self._whole(scope, receive, send)
        else:
            error = Unavailable("this worker has a stage and takes no calls", retry_after_s=0)
            await respond_error(send, error, "")

    def _grow(self) -> None:
        try:
            self._whole = self._load()
        except Exception as error:
            log.exception("the stage could not grow")
            with self._lock:
                self._growing = False
            if self._worker.ended:
                self._of.end(f"it could not grow: {error}")
            return
        borrower = Borrower(self._whole.service, lambda message: self.links.send(0, message))
        self._worker.on_lending = borrower.on_frame
        self._of.whole()
        self._closed.wait(FIRST_CALLS_S)
        with contextlib.suppress(LinkBroken):  # then there is nobody whose requests it could take
            self.links.send(0, Grown(self._whole.service.active_count))

    def _on_end(self, why: str) -> None:
        """Its pipeline is no more. Who grows meanwhile goes on without it."""
        if self._growing:
            log.info("the pipeline ended, the stage grows on", extra={"why": why})
        else:
            self._of.end(why)
