"""Runner along a pipeline: the first stage's layers, the other stages' layers, then the head.

Several steps are in flight, so that every stage has work; results arrive in order. If a stage is lost, so are the keys
and values of its layers: waiting steps fail, and no step is accepted until the whole model is loaded (`consolidation`).
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ...pipeline.frames import (
    KvData,
    KvRequest,
    LinkBroken,
    Message,
    MigratedToken,
    MigrationAborted,
    MigrationCaughtUp,
    MigrationMessage,
    Promoted,
    StageStep,
    StepResult,
)
from ...pipeline.links import StageLinks
from ...pipeline.peer_stages import PeerStages
from ..engine.runner import Batch, RunnerLost, StepOutput
from .mode_switch import LinearCost
from .stage_worker import bytes_of, rows_of

RESULT_S = 60.0
"""Time limit of one step through all stages: far longer than any takes, so a stage that hangs counts as lost."""


class FrontDecoder(Protocol):
    """Decoder of the first stage: embedding, first layers, and head."""

    def forward(self, batch: Batch, hidden: Tensor | None = None) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def normed(self, hidden: Tensor) -> Tensor: ...

    def read_kv(self, table: list[int], begin: int, end: int) -> bytes: ...


class PipelineRunner(PeerStages):
    """`Runner` along a pipeline. `StageLinks` must call `on_frame` and `on_lost` of this object; `on_broken` is called
    once, with the reason, in one of their threads."""

    def __init__(self, stages: int, on_broken: Callable[[str], None]) -> None:
        def on_pipeline_broken(why: str) -> None:
            self._results.put(None)
            on_broken(why)

        super().__init__(stages, on_pipeline_broken)
        self._front: FrontDecoder | None = None
        self._hidden_size = 0
        self._numbers = itertools.count()
        self._under_way: deque[tuple[int, Batch]] = deque()
        self._results: queue.SimpleQueue[tuple[int, bytearray] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._kv: dict[int, Callable[[bytearray], None]] = {}
        self.on_migration: Callable[[int, MigrationMessage | None], None] = lambda stage, message: None
        """Receives messages about requests that stages compute, and None when a stage is lost."""
        self.front_cost = LinearCost()
        """Time of the first stage's layers by the number of tokens of a step, measured in the engine's thread."""

    # ── as a runner ────────────────────────────────────────────────────────────────────────────────

    @property
    def depth(self) -> int:
        return self.stages

    @property
    def stalled(self) -> bool:
        return bool(self.broken)

    @property
    def asynchronous(self) -> bool:
        return False  # `depth` steps are in flight anyway

    def submit(self, batch: Batch) -> None:
        number = next(self._numbers)
        self._under_way.append((number, batch))
        begun_s = time.perf_counter()
        hidden = bytes_of(self.front.forward(batch))  # a device has finished
        self.front_cost.observe(len(batch.tokens), time.perf_counter() - begun_s)
        step = StageStep(
            number=number,
            positions=batch.positions,
            starts=batch.starts,
            tables=batch.tables,
            logits_rows=batch.logits_rows + batch.embedding_rows,
        )
        try:
            self.send(1, step, hidden)
        except LinkBroken as error:
            raise self._lost() from error

    def collect(self) -> StepOutput:
        number, batch = self._under_way.popleft()
        while True:
            try:
                result = self._results.get(timeout=RESULT_S)
            except queue.Empty:
                self.break_up(f"no stage answered in {RESULT_S:g} s")
                result = None
            if result is None or self.broken:
                raise self._lost()
            if result[0] >= number:  # others were dropped
                break
        if result[0] != number:
            self.break_up(f"step {result[0]} came back, expected {number}")
            raise self._lost()
        hidden = rows_of(result[1], self._hidden_size)
        count = len(batch.logits_rows)
        return StepOutput(
            logits=self.front.logits(hidden[:count]),
            embeddings=self.front.normed(hidden[count:]) if batch.embedding_rows else None,
        )

    def drop(self) -> None:
        self._under_way.clear()

    def _lost(self) -> RunnerLost:
        self._under_way.clear()
        return RunnerLost(self.broken or "a link broke")

    # ── its links ──────────────────────────────────────────────────────────────────────────────────

    def begin(self, links: StageLinks, front: FrontDecoder, hidden_size: int) -> None:
        """Sets the first stage's decoder once it is loaded; other stages may have reported before."""
        self._links, self._front, self._hidden_size = links, front, hidden_size

    def free_front(self) -> None:
        """Frees the first stage's layers and their KV blocks, once another runner computes."""
        self._front = None

    @property
    def front(self) -> FrontDecoder:
        assert self._front is not None
        return self._front

    def read_kv(self, stage: int, table: list[int], begin: int, end: int, take: Callable[[bytearray], None]) -> None:
        """Requests a stage's keys and values of tokens `[begin, end)`; `take` is called in a thread of the links.

        Errors: LinkBroken.
        """
        number = next(self._numbers)
        with self._lock:
            self._kv[number] = take
        self.send(stage, KvRequest(number, table, begin, end))

    def on_frame(self, stage: int, message: Message, payload: bytearray) -> None:
        match message:
            case StepResult(number=number):
                self._results.put((number, payload))
            case KvData(number=number):
                with self._lock:
                    take = self._kv.pop(number, None)
                if take is not None:
                    take(payload)
            case Promoted() | MigrationCaughtUp() | MigratedToken() | MigrationAborted():
                self.on_migration(stage, message)
            case _:
                self.handle(stage, message)

    def on_lost(self, stage: int, why: str) -> None:
        self.on_migration(stage, None)
        self.break_up(f"stage {stage} is lost: {why}")
