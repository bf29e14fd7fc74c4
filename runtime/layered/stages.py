"""A worker that has a stage of a model in layers: what it serves, its links, and how it grows into a whole worker.

There is nothing to copy when it grows, because calls keep nothing in the layers: calls that come go to the whole model,
those under way end in the pipeline, and then the other stages are let go. `FirstStage` and `LaterStage` are told of
connections and of growth by the shell.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fleetstart.runtime.asgi import Receive, Scope, Send, respond_error
from fleetstart.runtime.contract.errors import FleetError, StartFailed, Unavailable
from fleetstart.runtime.contract.function import FunctionSpec
from fleetstart.runtime.contract.messages import Speed
from fleetstart.runtime.declare import Layered
from fleetstart.runtime.layered.app import LayeredApp, Runner
from fleetstart.runtime.layered.pipeline import Pipeline
from fleetstart.runtime.layered.row import Row, build
from fleetstart.runtime.layered.stage_worker import StageWorker
from fleetstart.runtime.pipeline.lead import Lead
from fleetstart.runtime.pipeline.links import Links
from fleetstart.runtime.pipeline.part import StageOf

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What every worker of such a function is made of. `weights` is given to the model as it is."""

    model: Layered
    weights: Any
    layers: int
    """Of the whole model."""
    spec: FunctionSpec
    bundle_dir: str

    def row(self, first: int, end: int) -> Row:
        return Row(first, build(self.model, self.weights, first, end))

    def app(self, runner: Runner, stages: int = 1) -> LayeredApp:
        """Waits for what the ends of the model need."""
        self.model.load(self.weights)
        return LayeredApp(
            self.model,
            runner,
            stages=stages,
            slots=self.spec.concurrency,
            timeout_s=self.spec.timeout_s,
            bundle_dir=self.bundle_dir,
        )


def whole_app(parts: Parts) -> LayeredApp:
    """Of a worker that has the whole model from the beginning. `load` first: its weights come first."""
    app = parts.app(_Nothing())
    app.take_over(parts.row(0, parts.layers))
    return app


class _Nothing:
    """Before the layers are there; nobody calls until they are."""

    def run(self, activations: Any) -> Any:
        raise AssertionError("called before it was ready")


class FirstStage:
    """Loads its layers; ready when all stages are, or, if one is lost on the way, when it has the whole model."""

    def __init__(self, parts: Parts, of: StageOf) -> None:
        """Returns when its own layers are there. Errors: what the model raises."""
        self._parts = parts
        self._stage = of.stage
        self._lead = Lead(of)
        self._pipeline = Pipeline(of.stage.count, self._lead.on_broken, answer_s=parts.spec.timeout_s)
        self.links = Links(of.stage, of.secret, of.membership.listener, self._pipeline.on_frame, self._pipeline.on_lost)
        of.membership.adopt(self)
        self.app = parts.app(self._pipeline, of.stage.count)
        self._row = parts.row(of.stage.first, of.stage.end)
        self._pipeline.begin(self.links, self._row)
        self._lead.loaded(self._pipeline, self._begin_growth)
        self.speed: Callable[[], Speed | None] = self.app.speed

    def connect(self, index: int, link: socket.socket) -> None:
        self.links.connect(index, link)

    def wait_until_ready(self) -> None:
        """Errors: StartFailed, and what kept it from growing."""
        self._lead.wait_until_ready()

    def grow(self) -> None:
        self._lead.grow()

    def close(self) -> None:
        self.links.close()

    def _begin_growth(self, on_end: Callable[[FleetError | None], None]) -> None:
        threading.Thread(target=self._grow, args=(on_end,), name="layered-growth", daemon=True).start()

    def _grow(self, on_end: Callable[[FleetError | None], None]) -> None:
        parts = self._parts
        try:
            rest = build(parts.model, parts.weights, self._stage.end, parts.layers)
            self.app.take_over(self._row.within([], rest))
            self._pipeline.dismiss()
        except FleetError as error:
            on_end(error)
        except Exception as error:
            log.exception("growing failed")
            on_end(FleetError(f"{type(error).__name__}: {error}"))
        else:
            on_end(None)


class LaterStage:
    """Computes for its pipeline, and serves callers once it has grown: then it is a whole worker (scale up)."""

    def __init__(self, parts: Parts, of: StageOf) -> None:
        """Returns when its layers are there. Errors: what the model raises."""
        self._parts = parts
        self._of = of
        self._lock = threading.Lock()
        self._growing = False
        self._whole: LayeredApp | None = None
        self._worker = StageWorker(self._on_end, bundle_dir=parts.bundle_dir)
        self.links = Links(of.stage, of.secret, of.membership.listener, self._worker.on_frame, self._worker.on_lost)
        of.membership.adopt(self)
        self._row = parts.row(of.stage.first, of.stage.end)

    def connect(self, index: int, link: socket.socket) -> None:
        self.links.connect(index, link)

    def wait_until_ready(self) -> None:
        """Errors: StartFailed if its links do not stand in time."""
        left_s = (self._of.deadline_ns - time.monotonic_ns()) / 1e9
        if not self.links.wait(max(0.0, left_s)):
            raise StartFailed(f"stage {self._of.stage.index}: no links to the other stages of its pipeline in time")
        self._worker.run(self.links, self._row)

    def grow(self) -> None:
        """Takes the whole model in beside what it does for its pipeline. Once; again only after it failed."""
        with self._lock:
            if self._growing:
                return
            self._growing = True
        threading.Thread(target=self._grow, name="layered-growth", daemon=True).start()

    def speed(self) -> Speed | None:
        """Once it has grown."""
        return self._whole.speed() if self._whole is not None else None

    def close(self) -> None:
        self._worker.close()
        self.links.close()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._whole is not None:
            await self._whole(scope, receive, send)
        else:
            error = Unavailable("this worker has a stage and takes no calls", retry_after_s=0)
            await respond_error(send, error, "")

    def _grow(self) -> None:
        parts, stage = self._parts, self._of.stage
        try:
            app = parts.app(_Nothing())
            before = build(parts.model, parts.weights, 0, stage.first)
            after = build(parts.model, parts.weights, stage.end, parts.layers)
            app.take_over(self._row.within(before, after))
        except Exception as error:
            log.exception("the stage could not grow")
            with self._lock:
                self._growing = False
            if self._worker.ended:
                self._of.end(f"it could not grow: {error}")
            return
        self._whole = app
        self._of.whole()

    def _on_end(self, why: str) -> None:
        """Its pipeline is no more. Who grows meanwhile goes on without it."""
        if self._growing:
            log.info("the pipeline ended, the stage grows on", extra={"why": why})
        else:
            self._of.end(why)
