"""LLM pipeline stages: a worker with some of the layers, its links, and its consolidation into a whole worker.

`start` builds them; `NodeMessages` calls `connect` and `consolidate`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from functools import partial

from ...contract.function.spec import LLMSettings
from ...contract.node.speed import Speed
from ...pipeline.first_stage import FirstStageLifecycle
from ...pipeline.frames import LinkBroken, Promoted
from ...pipeline.later_stage import LaterStageLifecycle
from ...pipeline.links import StageLinks
from ...pipeline.stage_context import StageContext
from ..engine.runner import Runner
from ..model.loader import BLOCK_TOKENS, DecoderBuilder, decoder_builder, load_model
from ..model.weights import ModelWeights
from ..server.app import LLMApp
from .consolidation import Consolidation, ConsolidationPlan
from .pipeline_runner import PipelineRunner
from .request_migration import MigrationSource, MigrationTarget
from .stage_worker import LLMStageWorker, StageDecoder

FIRST_CALLS_S = 0.5
"""Delay before a consolidated stage accepts migrations: calls that wait at the gateway come first."""


class LLMFirstStage:
    """First stage: serves the function's routes; ready with all stages or, if one is lost, with the whole model."""

    def __init__(
        self, weights: ModelWeights, settings: LLMSettings, context: StageContext, *, name: str, threads: int
    ) -> None:
        """Loads its own layers. Errors: as of `load_model`."""
        self._stage = context.stage
        self._lifecycle = FirstStageLifecycle(context)
        self._pipeline = PipelineRunner(context.stage.count, self._lifecycle.on_broken)
        self.links = StageLinks(
            context.stage,
            context.secret,
            context.node_messages.listener,
            self._pipeline.on_frame,
            self._pipeline.on_lost,
            context.identity,
        )
        context.node_messages.adopt(self)
        built: list[DecoderBuilder] = []
        model = load_model(weights, settings, threads=threads, runner=lambda one: self._runner(built, one))
        self.app = LLMApp(model, name=name)
        self._pipeline.on_migration = MigrationSource(self.app.service, self._pipeline.send).on_frame
        parts = ConsolidationPlan(
            service=self.app.service,
            pipeline=self._pipeline,
            load=built[0].whole,
            cuts=context.stage.cuts,
            kv_bytes=built[0].kv_bytes,
            block_tokens=BLOCK_TOKENS,
        )
        self._lifecycle.loaded(self._pipeline, lambda on_end: Consolidation(parts, on_end).start())

    def _runner(self, built: list[DecoderBuilder], one: DecoderBuilder) -> Runner:
        built.append(one)
        front = one.decoder(self._stage.first, self._stage.end)
        self._pipeline.begin(self.links, front, one.config.hidden_size)
        return self._pipeline

    def connect(self, index: int, link: socket.socket) -> None:
        self.links.connect(index, link)

    def wait_until_ready(self) -> None:
        """Blocks until it can serve. Errors: StartFailed, those of consolidation."""
        self._lifecycle.wait_until_ready()

    def consolidate(self) -> None:
        """Starts to load the whole model and to take over the requests."""
        self._lifecycle.consolidate()

    def speed(self) -> Speed | None:
        return self.app.speed()

    def close(self) -> None:
        self.app.close()
        self.links.close()


class LLMLaterStage(LaterStageLifecycle[LLMApp]):
    """Later stage: computes for the other stages; serves calls after consolidation."""

    def __init__(
        self, weights: ModelWeights, settings: LLMSettings, context: StageContext, *, name: str, threads: int
    ) -> None:
        """Loads its layers. Errors: as of `load_model`."""
        self._load_app: Callable[[], LLMApp] = partial(_app, weights, settings, threads, name)
        self._closed = threading.Event()
        self._worker = LLMStageWorker(self.on_end)
        super().__init__(context, self._worker)
        self._built = decoder_builder(weights, settings, threads=threads, whole=False)
        self._decoder: StageDecoder | None = self._built.decoder(context.stage.first, context.stage.end)

    def _run(self) -> None:
        decoder, self._decoder = self._decoder, None
        assert decoder is not None
        self._worker.run(self.links, decoder, self._built.config.hidden_size)

    def close(self) -> None:
        self._closed.set()
        super().close()
        if self.whole_app is not None:
            self.whole_app.close()

    def _load(self) -> LLMApp:
        app = self._load_app()
        target = MigrationTarget(app.service, lambda message: self.links.send(0, message))
        self._worker.on_migration = target.on_frame
        return app

    def _on_consolidated(self, app: LLMApp) -> None:
        self._closed.wait(FIRST_CALLS_S)
        with contextlib.suppress(LinkBroken):  # no first stage, no requests to take over
            self.links.send(0, Promoted(app.service.active_count))


def _app(weights: ModelWeights, settings: LLMSettings, threads: int, name: str) -> LLMApp:
    return LLMApp(load_model(weights, settings, threads=threads), name=name)
