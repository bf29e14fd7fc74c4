"""Runner of the engine's steps: computes batches by a decoder in this process, or along a pipeline of workers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .sequences import PlannedChunk


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
    embedding_rows: list[int] = field(default_factory=list)
    """Rows whose final hidden state is wanted."""
    device_tokens: Tensor | None = None
    """Tokens of the first rows, on the decoder's device, where the host does not know them yet; `tokens` has zeros."""


def batch_of(chunks: list[PlannedChunk], device_tokens: Tensor | None = None) -> Batch:
    """The batch of the concatenated chunks. `device_tokens`: those of the chunks that follow the step before, which are
    the first ones."""
    tokens: list[int] = []
    positions: list[int] = []
    starts = [0]
    logits_rows: list[int] = []
    embedding_rows: list[int] = []
    for chunk in chunks:
        tokens += [0] if chunk.follows else chunk.sequence.tokens[chunk.begin : chunk.end]
        positions += range(chunk.begin, chunk.end)
        starts.append(len(tokens))
        if chunk.samples:
            (embedding_rows if chunk.sequence.embeds else logits_rows).append(len(tokens) - 1)
    return Batch(
        tokens=tokens,
        positions=positions,
        starts=starts,
        tables=[chunk.sequence.table for chunk in chunks],
        logits_rows=logits_rows,
        embedding_rows=embedding_rows,
        device_tokens=device_tokens,
    )


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A submitted step: its chunks, those whose last row is sampled, and those whose last hidden state is wanted."""

    chunks: list[PlannedChunk]
    sampling: list[PlannedChunk]
    embedding: list[PlannedChunk]

    @classmethod
    def of(cls, chunks: list[PlannedChunk]) -> StepInFlight:
        """The step of chunks whose last tokens are as far known as they are now."""
        return cls(
            chunks,
            [chunk for chunk in chunks if chunk.samples and not chunk.sequence.embeds],
            [chunk for chunk in chunks if chunk.samples and chunk.sequence.embeds],
        )


def tokens_for(chunks: list[PlannedChunk], sampled: list[PlannedChunk], tokens: Tensor) -> Tensor:
    """Those of the tokens, one a sampled chunk, with which chunks of the next step follow, in their order."""
    wanted = {chunk.sequence.id for chunk in chunks if chunk.follows}
    return rows_of(tokens, [row for row, chunk in enumerate(sampled) if chunk.sequence.id in wanted])


def rows_of(values: Tensor, rows: list[int]) -> Tensor:
    """Those of the values, [values, ...], by ascending numbers. The host waits for nothing, as it would with a list for
    an index."""
    if len(rows) == len(values):
        return values
    return values[torch.tensor(rows, dtype=torch.long).to(values.device, non_blocking=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Output of one step. Valid until the next one.

    Shapes:  logits [len(batch.logits_rows), vocab_size]; embeddings [len(batch.embedding_rows), hidden_size], the
             hidden states after the final norm in fp32, None if none are wanted.
    """

    logits: Tensor
    embeddings: Tensor | None = None


class Decoder(Protocol):
    """Arithmetic of a whole model. Results are valid until the next call."""

    @property
    def asynchronous(self) -> bool:
        """Checks whether a device may still compute the last step for longer than the host takes to give it one."""
        ...

    def forward(self, batch: Batch) -> Tensor:
        """Logits [len(batch.logits_rows), vocab_size]."""
        ...

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states [rows, hidden_size] after the last layer, before the final norm."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab_size] of hidden states [n, hidden_size]."""
        ...

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, hidden_size] after the final norm, in fp32."""
        ...


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
        """Checks whether the runner accepts no steps for now."""
        ...

    @property
    def asynchronous(self) -> bool:
        """Checks whether a device computes steps like the last one while the host does something else. The next one is
        submitted before the host knows its tokens, or else as soon as it does."""
        ...

    def submit(self, batch: Batch) -> None:
        """Starts a step. Errors: RunnerLost, and those of the arithmetic."""
        ...

    def collect(self) -> StepOutput:
        """Waits for the oldest step. Errors: as of `submit`."""
        ...

    def drop(self) -> None:
        """Drops the steps that were submitted and not collected."""
        ...


class LocalRunner:
    """Runner over a decoder in this process.

    A step is computed when it is submitted if a device computed the last one asynchronously. Otherwise it is computed
    when it is collected, for the host, which computes it or launches it kernel by kernel, first makes text of the last
    one's tokens.
    """

    depth = 1
    stalled = False

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._steps: deque[Batch | StepOutput] = deque()

    @property
    def asynchronous(self) -> bool:
        return self._decoder.asynchronous

    def submit(self, batch: Batch) -> None:
        self._steps.append(self._compute(batch) if self.asynchronous else batch)

    def collect(self) -> StepOutput:
        step = self._steps.popleft()
        return self._compute(step) if isinstance(step, Batch) else step

    def drop(self) -> None:
        self._steps.clear()

    def _compute(self, batch: Batch) -> StepOutput:
        if not batch.embedding_rows:
            return StepOutput(logits=self._decoder.forward(batch))
        hidden = self._decoder.hidden(batch)
        return StepOutput(
            logits=self._decoder.logits(hidden[batch.logits_rows]),
            embeddings=self._decoder.normed(hidden[batch.embedding_rows]),
        )


class ReleasedRunner:
    """Runner of an engine without weights: accepts no steps."""

    depth = 1
    stalled = True
    asynchronous = False

    def submit(self, batch: Batch) -> None:
        raise RunnerLost("the weights are released")

    def collect(self) -> StepOutput:
        raise RunnerLost("the weights are released")

    def drop(self) -> None:
        pass
