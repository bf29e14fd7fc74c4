"""Where the engine's steps are computed: by the decoder in this process, or along a pipeline of workers."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from torch import Tensor

from .batch import Batch


class Decoder(Protocol):
    """The arithmetic. Logits [len(batch.logits_rows), vocab], valid until the next call."""

    def forward(self, batch: Batch) -> Tensor: ...


class RunnerLost(Exception):
    """Part of the pipeline is gone, and with it the keys and values of all that ran: they must begin anew."""


class Runner(Protocol):
    """Steps in, logits out, in the same order. For one thread at a time."""

    @property
    def depth(self) -> int:
        """Steps that keep all of it busy."""
        ...

    @property
    def stalled(self) -> bool:
        """Whether it can take none for now; it will tell when it can."""
        ...

    def submit(self, batch: Batch) -> None:
        """Errors: RunnerLost, and what the arithmetic raises."""
        ...

    def collect(self) -> Tensor:
        """Logits of the oldest step under way, as of `Decoder.forward`. Blocks. Errors: as of `submit`."""
        ...


class LocalRunner:
    """A decoder in this process, one step at a time."""

    depth = 1
    stalled = False

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._batches: deque[Batch] = deque()

    def submit(self, batch: Batch) -> None:
        self._batches.append(batch)

    def collect(self) -> Tensor:
        return self._decoder.forward(self._batches.popleft())
