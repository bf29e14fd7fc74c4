"""Compute loop of a later LLM stage: receives hidden states, runs its layers, sends them to the next stage.

One thread computes steps in order; another reads keys and values for the first stage, which only requests tokens whose
steps have ended.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ...contract.weights.stage import Stage
from ...pipeline.frames import (
    Dismiss,
    KvData,
    KvRequest,
    Message,
    MigrationAborted,
    MigrationHandover,
    MigrationMessage,
    MigrationOffer,
    StageBroken,
    StageStep,
    StepResult,
)
from ...pipeline.links import StageLinks
from ...pipeline.stage_protocol import StageProtocol
from ..engine.runner import Batch

log = logging.getLogger(__name__)


class StageDecoder(Protocol):
    """Layers of one stage with their KV blocks, of `TorchDecoder` or `NativeDecoder`."""

    def forward(self, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        """Runs the stage's layers over the batch.

        Shapes:  hidden [rows, hidden_size] from the stage before, None for the first stage.
                 Returns hidden [rows, hidden_size].
        """
        ...

    def read_kv(self, table: list[int], begin: int, end: int) -> bytes:
        """Keys and values of tokens `begin .. end - 1` of the sequence whose blocks are `table`.

        Shapes:  [layer][key, value][kv_head][token][head_dim] in the cache's dtype.
        """
        ...


class LLMStageWorker(StageProtocol):
    """Later stage of an LLM pipeline; computes after `run`."""

    def __init__(self, on_end: Callable[[str], object]) -> None:
        super().__init__(on_end)
        self.on_migration: Callable[[MigrationMessage | None], object] = lambda message: None
        """Receives messages about migrated requests, and None when the first stage is lost."""
        self._work: queue.SimpleQueue[tuple[StageStep, bytearray] | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[KvRequest | None] = queue.SimpleQueue()

    def run(self, links: StageLinks, decoder: StageDecoder, hidden_size: int) -> None:
        """Starts to compute, when layers and links are ready, and reports that to the first stage.

        The threads alone hold the decoder: a stage that has become a whole worker frees it when its pipeline ends.
        """
        for name, body in (
            ("stage", lambda: self._compute(links.stage, decoder, hidden_size)),
            ("stage-kv", lambda: self._read(decoder)),
        ):
            threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True).start()
        self.begin(links)

    def on_frame(self, index: int, message: Message, payload: bytearray) -> None:
        match message:
            case StageStep():
                self._work.put((message, payload))
            case KvRequest():
                self._reads.put(message)
            case Dismiss():
                self.end("")
            case MigrationOffer() | MigrationHandover() | MigrationAborted():
                self.on_migration(message)
            case _:
                log.warning("a frame that no stage sends to this one", extra={"frame": type(message).__name__})

    def on_lost(self, index: int, why: str) -> None:
        if index == 0:
            self.on_migration(None)
        super().on_lost(index, why)

    def close(self) -> None:
        self._work.put(None)
        self._reads.put(None)

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as error:
            log.exception("the stage failed")
            self.send(0, StageBroken(f"{type(error).__name__}: {error}"))

    def _compute(self, stage: Stage, decoder: StageDecoder, hidden_size: int) -> None:
        torch.set_num_threads(1)
        while (work := self._work.get()) is not None:
            step, payload = work
            batch = Batch(
                tokens=[0] * len(step.positions),
                positions=step.positions,
                starts=step.starts,
                tables=step.tables,
                logits_rows=step.logits_rows,
            )
            hidden = decoder.forward(batch, rows_of(payload, hidden_size))
            if stage.index + 1 < stage.count:
                self.send(stage.index + 1, step, bytes_of(hidden))
            else:
                self.send(0, StepResult(step.number), bytes_of(hidden[step.logits_rows]))

    def _read(self, decoder: StageDecoder) -> None:
        while (wanted := self._reads.get()) is not None:
            self.send(0, KvData(wanted.number), decoder.read_kv(wanted.table, wanted.begin, wanted.end))


def bytes_of(hidden: Tensor) -> memoryview:
    """Hidden states as bytes on the wire: rows of fp32."""
    numbers: Any = hidden.detach().float().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


def rows_of(payload: bytearray, hidden_size: int) -> Tensor:
    """Hidden states [rows, hidden_size] from a frame's payload. Errors: ValueError for partial rows."""
    if len(payload) % (4 * hidden_size):
        raise ValueError(f"{len(payload)} bytes are no rows of {hidden_size} numbers")
    if not payload:
        return torch.empty(0, hidden_size)
    return torch.frombuffer(payload, dtype=torch.float32).view(-1, hidden_size)
