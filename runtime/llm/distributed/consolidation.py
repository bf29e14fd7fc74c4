"""Consolidation at the first stage: it loads the rest of the model and takes over the running requests (scale down).

While the pipeline serves, a thread waits for the other layers, then gets the keys and values of running requests in
rounds: it copies them from the other stages or computes them again from the tokens, whichever is predicted to be sooner
(`mode_switch`). When few tokens are left, the engine completes the steps in flight, the rest is brought, and the stage
continues alone with the same tokens (HydraServe section 6.2 stops all requests for the whole copy). If the pipeline
breaks, the requests are recomputed from their tokens as soon as the layers are loaded.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...contract.errors import FleetError
from ...contract.node.speed import ModeSwitch
from ...pipeline.first_stage import OnEnd
from ...pipeline.frames import LinkBroken
from ..engine.engine import Engine
from ..engine.generation import TokenDelta
from ..engine.runner import Batch, Decoder, LocalRunner
from ..server.engine_service import EngineService
from .kv_copy import ComputedSequence, KvCopyPlan, KvSpan
from .mode_switch import LinearCost, batches, choose, missing_tokens, tokens_of
from .pipeline_runner import PipelineRunner

log = logging.getLogger(__name__)

ROUNDS_MOST = 20
FEW_TOKENS = 2
"""Tokens a sequence left to copy at which the last round starts."""
PIECE_S = 10.0
"""Time limit of one piece from a live stage: far longer than a slow link takes."""
SNAPSHOT_S = 60.0


class WholeDecoder(Decoder, Protocol):
    def write_kv(
        self, table: list[int], begin: int, end: int, first_layer: int, data: bytes | bytearray | memoryview
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidationPlan:
    """Inputs of a consolidation: the serving pipeline and the loader of the whole model."""

    service: EngineService
    pipeline: PipelineRunner
    load: Callable[[], WholeDecoder]
    """Waits for all layers and binds them."""
    cuts: tuple[tuple[int, int], ...]
    """Layers [first, end) of each stage."""
    kv_bytes: int
    """Size of one layer's key and value of one token."""
    block_tokens: int


class Consolidation:
    """One consolidation, in its own thread; `on_end` is called once there, with the error or None."""

    def __init__(self, parts: ConsolidationPlan, on_end: OnEnd) -> None:
        self._parts = parts
        self._on_end = on_end
        self._copy = KvCopyPlan(parts.block_tokens)
        layers, own = parts.cuts[-1][1], parts.cuts[0][1]
        self._layers_elsewhere = layers - own
        self._factor = layers / own
        self._copy_cost = LinearCost()
        """Time of a piece by its bytes."""
        self._compute_cost = LinearCost()
        """Time of a step by its tokens."""
        self._switch = ModeSwitch()
        self._thread = threading.Thread(target=self._run, name="llm-consolidation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            whole = self._parts.load()
            if not self._parts.pipeline.broken:
                self._compute_cost = self._parts.pipeline.front_cost.scaled(self._factor)
                self._bring_in_rounds(whole)
            self._in_engine(lambda engine: self._take_over(engine, whole), settled=True)
            self._parts.pipeline.dismiss()
            self._parts.pipeline.free_front()
        except FleetError as error:
            self._on_end(error)
        except Exception as error:
            log.exception("consolidation failed")
            self._on_end(FleetError(f"{type(error).__name__}: {error}"))
        else:
            self._on_end(None, self._switch)

    def _bring_in_rounds(self, whole: WholeDecoder) -> None:
        for _ in range(ROUNDS_MOST):
            running = self._computed_sequences()
            try:
                brought = self._bring(running, whole)
            except _CopyFailed:
                return
            if brought <= FEW_TOKENS * len(running):
                return

    def _bring(self, running: Sequence[ComputedSequence], whole: WholeDecoder) -> int:
        """Copies or computes the missing keys and values of running requests; number of tokens. Errors:
        _CopyFailed."""
        spans = self._copy.missing(running)
        if not spans:
            return 0
        missing = missing_tokens(spans)
        begun_s = time.monotonic()
        copied = 0
        if self._copy_cost.predict_s(1) is None:  # the first piece tells what others would cost
            first = spans.pop(0)
            self._fetch(first, whole)
            copied = first.end - first.begin
        choice = choose(missing_tokens(spans), self._copy_s, self._recompute_s)
        for span in spans:
            if span.id in choice.copied:
                self._fetch(span, whole)
                copied += span.end - span.begin
        tokens = tokens_of(running)
        for batch in batches(span for span in spans if span.id not in choice.copied):
            self._recompute(batch, tokens, whole)
        total = sum(missing.values())
        self._switch = self._switch.with_round(
            copied=copied,
            recomputed=total - copied,
            copy_s=choice.copy_s,
            recompute_s=choice.recompute_s,
            took_s=time.monotonic() - begun_s,
        )
        return total

    def _copy_s(self, tokens: int) -> float:
        """Predicted time of a piece: of its latency, and of its bytes at the rate of the links."""
        return self._copy_cost.predict_s(self._bytes(tokens)) or 0.0

    def _recompute_s(self, tokens: int) -> float:
        """Predicted time of a step. No step measured, no prediction: then copying it is."""
        predicted_s = self._compute_cost.predict_s(tokens)
        return math.inf if predicted_s is None else predicted_s

    def _bytes(self, tokens: int) -> int:
        """Keys and values that other stages have of so many tokens."""
        return tokens * self._parts.kv_bytes * self._layers_elsewhere

    def _recompute(self, spans: Sequence[KvSpan], tokens: Mapping[int, tuple[int, ...]], whole: WholeDecoder) -> None:
        """Computes spans of several requests in one step."""
        begun_s = time.monotonic()
        batch = Batch(
            tokens=[token for span in spans for token in tokens[span.id][span.begin : span.end]],
            positions=[position for span in spans for position in range(span.begin, span.end)],
            starts=[0, *itertools.accumulate(span.end - span.begin for span in spans)],
            tables=[list(span.table) for span in spans],
            logits_rows=[],
        )
        hidden = whole.hidden(batch)
        float(hidden[-1, 0])  # waits for a device
        self._compute_cost.observe(len(batch.tokens), time.monotonic() - begun_s)
        for span in spans:
            self._copy.done(span)

    def _computed_sequences(self) -> list[ComputedSequence]:
        found: list[ComputedSequence] = []

        self._in_engine(lambda engine: found.extend(computed_sequences(engine)))
        return found

    def _take_over(self, engine: Engine, whole: WholeDecoder) -> None:
        """Switches the engine, which has no step in flight, to the whole model, in its thread; keys and values are
        copied or computed again. Errors: those of the whole model; then the engine is as it was."""
        pipeline = self._parts.pipeline
        try:
            running = computed_sequences(engine)
            if pipeline.broken and self._copy.missing(running):  # without a step in flight, the engine has not noticed
                raise _CopyFailed(pipeline.broken)
            self._bring(running, whole)
        except _CopyFailed as error:
            log.warning("running requests are recomputed", extra={"error": str(error)})
            engine.scheduler.restart()
        engine.take_over(LocalRunner(whole))

    def _fetch(self, span: KvSpan, whole: WholeDecoder) -> None:
        """Copies one span from all stages in parallel. Errors: _CopyFailed."""
        pipeline, table = self._parts.pipeline, list(span.table)
        begun_s = time.monotonic()
        pieces = [
            _Piece(whole, span, *self._parts.cuts[stage], self._parts.kv_bytes) for stage in range(1, pipeline.stages)
        ]
        try:
            for stage, piece in enumerate(pieces, start=1):
                pipeline.read_kv(stage, table, span.begin, span.end, piece.take)
            own = pipeline.front.read_kv(table, span.begin, span.end)
            whole.write_kv(table, span.begin, span.end, 0, own)
            ends_s = time.monotonic() + PIECE_S
            for piece in pieces:
                while not piece.written.wait(timeout=0.1):
                    if pipeline.broken or time.monotonic() > ends_s:
                        raise _CopyFailed(pipeline.broken or f"a stage did not answer in {PIECE_S:g} s")
        except LinkBroken as error:
            raise _CopyFailed(str(error)) from error
        finally:
            for piece in pieces:
                piece.close()
        self._copy_cost.observe(self._bytes(span.end - span.begin), time.monotonic() - begun_s)
        self._copy.done(span)

    def _in_engine(self, act: Callable[[Engine], None], *, settled: bool = False) -> None:
        """Runs a function in the engine's thread between two steps, with `settled` when none is in flight, and waits
        for it. Requests get the tokens of those steps, also if the function fails."""
        done = threading.Event()
        failure: list[Exception] = []

        def acting(engine: Engine) -> list[TokenDelta]:
            deltas: list[TokenDelta] = []
            try:
                if settled:
                    deltas += engine.settle()
                act(engine)
            except Exception as error:
                failure.append(error)
            finally:
                done.set()
            return deltas

        self._parts.service.do(acting)
        if not done.wait(SNAPSHOT_S):
            raise FleetError(f"the engine did not respond within {SNAPSHOT_S:g} s")
        if failure:
            raise failure[0]


class _Piece:
    """One stage's part of a span, written by a thread of the links when it comes, and not after `close`: then others
    may have the blocks."""

    def __init__(self, whole: WholeDecoder, span: KvSpan, first: int, end: int, kv_bytes: int) -> None:
        self.written = threading.Event()
        self._whole = whole
        self._span = span
        self._first = first
        self._expected_bytes = (end - first) * (span.end - span.begin) * kv_bytes
        self._lock = threading.Lock()
        self._closed = False

    def take(self, payload: bytearray) -> None:
        """Handler of the stage's answer. It checks the size, since a short one would leave layers unwritten."""
        if len(payload) != self._expected_bytes:
            raise ValueError(f"{len(payload)} bytes of keys and values, {self._expected_bytes} expected")
        with self._lock:
            if not self._closed:
                span = self._span
                self._whole.write_kv(list(span.table), span.begin, span.end, self._first, payload)
                self.written.set()

    def close(self) -> None:
        with self._lock:
            self._closed = True


class _CopyFailed(Exception):
    """Some keys and values could not be copied."""


def computed_sequences(engine: Engine) -> list[ComputedSequence]:
    """Running sequences that have keys and values."""
    return [
        ComputedSequence(
            sequence.id,
            tuple(sequence.table),
            sequence.computed,
            tuple(sequence.tokens[: sequence.computed]),
            sequence.admission,
        )
        for sequence in engine.scheduler.running
        if sequence.computed
    ]
