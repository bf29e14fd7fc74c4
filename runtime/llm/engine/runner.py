"""Runner of the engine's steps: computes batches by a decoder in this process, or along a pipeline of workers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's rows of several sequences, concatenated. Rows of sequence s are `starts[s] .. starts[s + 1]`; a decode
    is one row, a chunk of a prompt many.

    Positions within a sequence are consecutive. Row r writes its key and value at position
    `positions[r]`, block `tables[s][position // block_tokens]`, and attends to positions 0 to its own:
    those below the sequence's first row must have been written by earlier steps.
    """

    tokens: list[int]
    positions: list[int]
    starts: list[int]
    tables: list[list[int]]
    logits_rows: list[int]
    """Rows whose next-token logits are wanted."""


class Decoder(Protocol):
    """Model arithmetic. Returns logits [len(batch.logits_rows), vocab], valid until the next call."""

    def forward(self, batch: Batch) -> Tensor: ...


class RunnerLost(Exception):
    """Part of the pipeline is lost with the keys and values of all running sequences, which must be recomputed."""


class Runner(Protocol):
    """Computes steps in order: batches in, logits out. Not thread-safe."""

    @property
    def depth(self) -> int:
        """Number of steps in flight that keep the runner busy."""
        ...

    @property
    def stalled(self) -> bool:
        """Whether the runner accepts no steps for now."""
        ...

    def submit(self, batch: Batch) -> None:
        """Starts a step. Errors: RunnerLost, and those of the arithmetic."""
        ...

    def collect(self) -> Tensor:
        """Waits for the oldest step and returns its logits, as of `Decoder.forward`. Errors: as of `submit`."""
        ...


class LocalRunner:
    """Runner over a decoder in this process, one step at a time."""

    depth = 1
    stalled = False

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._batches: deque[Batch] = deque()

    def submit(self, batch: Batch) -> None:
        self._batches.append(batch)

    def collect(self) -> Tensor:
        return self._decoder.forward(self._batches.popleft())
