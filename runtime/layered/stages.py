"""Layered pipeline stages: a worker with some of the layers, its links, and its consolidation into a whole worker.

Nothing is copied on consolidation, because calls keep no state in the layers: new calls go to the whole model, running
calls end in the pipeline, and then the other stages are dismissed. `NodeMessages` calls `connect` and `consolidate`.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..contract.errors import FleetError
from ..contract.function.spec import FunctionSpec
from ..contract.node.speed import Speed
from ..pipeline.first_stage import FirstStageLifecycle, OnEnd
from ..pipeline.later_stage import LaterStageLifecycle
from ..pipeline.links import StageLinks
from ..pipeline.stage_context import StageContext
from ..sdk.declarations import Layered
from .app import LayeredApp, LayerRunner
from .layer_slice import LayerSlice, build
from .pipeline import LayeredPipeline
from .stage_worker import LayeredStageWorker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredModel:
    """Inputs of every worker of a layered function; `weights` is passed to the model."""

    model: Layered
    weights: Any
    layers: int
    """Number of layers of the whole model."""
    spec: FunctionSpec
    bundle_dir: str

    def layer_slice(self, first: int, end: int) -> LayerSlice:
        """Builds layers `first .. end - 1`."""
        return LayerSlice(first, build(self.model, self.weights, first, end))

    def app(self, runner: LayerRunner, stages: int = 1) -> LayeredApp:
        """Loads the ends of the model and builds the app."""
        self.model.load(self.weights)
        return LayeredApp(
            self.model,
            runner,
            stages=stages,
            slots=self.spec.concurrency,
            timeout_s=self.spec.timeout_s,
            bundle_dir=self.bundle_dir,
        )


def whole_app(parts: LayeredModel) -> LayeredApp:
    """App of a worker with the whole model. `load` runs first: its weights arrive first."""
    app = parts.app(_NotReady())
    app.take_over(parts.layer_slice(0, parts.layers))
    return app


class _NotReady:
    """Runner before the layers are loaded, when no call can arrive."""

    def run(self, activations: Any) -> Any:
        raise AssertionError("called before the layers were loaded")


class LayeredFirstStage:
    """First stage: serves calls; ready with all stages or, if one is lost, with the whole model."""

    def __init__(self, parts: LayeredModel, context: StageContext) -> None:
        """Loads its own layers. Errors: those of the model."""
        self._parts = parts
        self._stage = context.stage
        self._lifecycle = FirstStageLifecycle(context)
        self.pipeline = LayeredPipeline(context.stage.count, self._lifecycle.on_broken, answer_s=parts.spec.timeout_s)
        self.links = StageLinks(
            context.stage,
            context.secret,
            context.node_messages.listener,
            self.pipeline.on_frame,
            self.pipeline.on_lost,
            context.identity,
        )
        context.node_messages.adopt(self)
        self.app = parts.app(self.pipeline, context.stage.count)
        self._layer_slice = parts.layer_slice(context.stage.first, context.stage.end)
        self.pipeline.begin(self.links, self._layer_slice)
        self._lifecycle.loaded(self.pipeline, self._start_consolidation)
        self.speed: Callable[[], Speed | None] = self.app.speed

    def connect(self, index: int, link: socket.socket) -> None:
        self.links.connect(index, link)

    def wait_until_ready(self) -> None:
        """Blocks until it can serve. Errors: StartFailed, those of consolidation."""
        self._lifecycle.wait_until_ready()

    def consolidate(self) -> None:
        self._lifecycle.consolidate()

    def close(self) -> None:
        self.links.close()

    def _start_consolidation(self, on_end: OnEnd) -> None:
        threading.Thread(target=self._consolidate, args=(on_end,), name="layered-consolidation", daemon=True).start()

    def _consolidate(self, on_end: OnEnd) -> None:
        parts = self._parts
        try:
            rest = build(parts.model, parts.weights, self._stage.end, parts.layers)
            self.app.take_over(self._layer_slice.within([], rest))
            self.pipeline.dismiss()
        except FleetError as error:
            on_end(error)
        except Exception as error:
            log.exception("consolidation failed")
            on_end(FleetError(f"{type(error).__name__}: {error}"))
        else:
            on_end(None)


class LayeredLaterStage(LaterStageLifecycle[LayeredApp]):
    def __init__(self, parts: LayeredModel, context: StageContext) -> None:
        """Loads its layers. Errors: those of the model."""
        self._parts = parts
        self._worker = LayeredStageWorker(self.on_end, bundle_dir=parts.bundle_dir)
        super().__init__(context, self._worker)
        self._layer_slice = parts.layer_slice(context.stage.first, context.stage.end)

    def _run(self) -> None:
        self._worker.run(self.links, self._layer_slice)

    def _load(self) -> LayeredApp:
        parts, stage = self._parts, self._context.stage
        app = parts.app(_NotReady())
        before = build(parts.model, parts.weights, 0, stage.first)
        after = build(parts.model, parts.weights, stage.end, parts.layers)
        app.take_over(self._layer_slice.within(before, after))
        return app
