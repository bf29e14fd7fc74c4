"""Consolidation at the first stage: it takes the rest of the model in and the running requests over (scale down).

Beside the pipeline, which serves on, a thread waits for the other layers, then copies the keys and values of what
runs, round after round, from the stages that have them. What is left in the end is a few tokens: the engine ends the
steps under way, the rest is copied, and it goes on alone, with the same tokens (HydraServe section 6.2 stops all
requests for the whole of the copy). If the pipeline breaks at any point, the requests begin anew from the tokens that
they have, as soon as the layers are here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ...contract.errors import FleetError
from ...pipeline.frames import LinkBroken
from ..engine.engine import Engine
from ..engine.generation import TokenDelta
from ..engine.runner import Decoder, LocalRunner
from ..server.engine_service import EngineService
from .kv_copy import ComputedSequence, KvCopyPlan, KvSpan
from .pipeline_runner import PipelineRunner

log = logging.getLogger(__name__)

ROUNDS_MOST = 20
FEW_TOKENS = 2
"""A sequence, left to copy: the last round is worth it."""
PIECE_S = 10.0
"""For one piece from a stage that is alive: far longer than a slow link takes."""
SNAPSHOT_S = 60.0


class WholeDecoder(Decoder, Protocol):
    def write_kv(
        self, table: list[int], begin: int, end: int, first_layer: int, data: bytes | bytearray | memoryview
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidationPlan:
    """What grows, and into what."""

    service: EngineService
    pipeline: PipelineRunner
    load: Callable[[], WholeDecoder]
    """Waits for all layers, and binds them."""
    cuts: tuple[tuple[int, int], ...]
    """Layers of each stage."""
    kv_bytes: int
    """That one layer keeps of one token."""
    block_tokens: int


class Consolidation:
    """One growing; `on_end` is called once, with the error or None, in its thread."""

    def __init__(self, parts: ConsolidationPlan, on_end: Callable[[FleetError | None], None]) -> None:
        self._parts = parts
        self._on_end = on_end
        self._copy = KvCopyPlan(parts.block_tokens)
        self._thread = threading.Thread(target=self._run, name="llm-growth", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            whole = self._parts.load()
            if not self._parts.pipeline.broken:
                self._copy_in_rounds(whole)
            self._in_engine(lambda engine: self._take_over(engine, whole))
            self._parts.pipeline.dismiss()
        except FleetError as error:
            self._on_end(error)
        except Exception as error:
            log.exception("growing failed")
            self._on_end(FleetError(f"{type(error).__name__}: {error}"))
        else:
            self._on_end(None)

    def _copy_in_rounds(self, whole: WholeDecoder) -> None:
        for _ in range(ROUNDS_MOST):
            running = self._running()
            spans = self._copy.missing(running)
            try:
                for span in spans:
                    self._fetch(span, whole)
            except _CopyFailed:
                return
            if sum(span.end - span.begin for span in spans) <= FEW_TOKENS * len(running):
                return

    def _running(self) -> list[ComputedSequence]:
        found: list[ComputedSequence] = []

        def look(engine: Engine) -> list[TokenDelta]:
            found.extend(computed_sequences(engine))
            return []

        self._in_engine(look)
        return found

    def _take_over(self, engine: Engine, whole: WholeDecoder) -> list[TokenDelta]:
        """In the engine's thread. Either all that runs has its keys and values here, or it begins anew."""
        pipeline = self._parts.pipeline
        deltas = engine.settle()
        try:
            for span in self._copy.missing(computed_sequences(engine)):
                if pipeline.broken:  # and no step was under way that would have told the engine
                    raise _CopyFailed(pipeline.broken)
                self._fetch(span, whole)
        except _CopyFailed as error:
            log.warning("running requests are computed anew", extra={"error": str(error)})
            engine.scheduler.restart()
        engine.take_over(LocalRunner(whole))
        return deltas

    def _fetch(self, span: KvSpan, whole: WholeDecoder) -> None:
        """From all stages at once. Errors: _CopyBroken."""
        pipeline, table = self._parts.pipeline, list(span.table)
        arrived = threading.Semaphore(0)
        asked = 0
        try:
            for stage in range(1, pipeline.stages):
                pipeline.read_kv(stage, table, span.begin, span.end, self._taker(span, stage, whole, arrived))
                asked += 1
        except LinkBroken as error:
            raise _CopyFailed(str(error)) from error
        own = pipeline.front.read_kv(table, span.begin, span.end)
        whole.write_kv(table, span.begin, span.end, 0, own)
        ends_s = time.monotonic() + PIECE_S
        for _ in range(asked):
            while not arrived.acquire(timeout=0.1):
                if pipeline.broken or time.monotonic() > ends_s:
                    raise _CopyFailed(pipeline.broken or f"a stage did not answer in {PIECE_S:g} s")
        self._copy.done(span)

    def _taker(
        self, span: KvSpan, stage: int, whole: WholeDecoder, arrived: threading.Semaphore
    ) -> Callable[[bytearray], None]:
        """What to do with the stage's answer. A short one would leave layers that nobody wrote."""
        first, end = self._parts.cuts[stage]
        expected_bytes = (end - first) * (span.end - span.begin) * self._parts.kv_bytes

        def take(payload: bytearray) -> None:
            if len(payload) != expected_bytes:
                raise ValueError(f"{len(payload)} bytes of keys and values, {expected_bytes} expected")
            whole.write_kv(list(span.table), span.begin, span.end, first, payload)
            arrived.release()

        return take

    def _in_engine(self, act: Callable[[Engine], list[TokenDelta]]) -> None:
        """Runs it between two steps and waits for its end."""
        done = threading.Event()
        failure: list[Exception] = []

        def acting(engine: Engine) -> list[TokenDelta]:
            try:
                return act(engine)
            except Exception as error:
                failure.append(error)
                return []
            finally:
                done.set()

        self._parts.service.do(acting)
        if not done.wait(SNAPSHOT_S):
            raise FleetError(f"the engine took no notice for {SNAPSHOT_S:g} s")
        if failure:
            raise failure[0]


class _CopyFailed(Exception):
    """Some keys and values cannot be had."""


def computed_sequences(engine: Engine) -> list[ComputedSequence]:
    return [
        ComputedSequence(sequence.id, tuple(sequence.table), sequence.computed)
        for sequence in engine.scheduler.running
        if sequence.computed
    ]
