"""Steps of the engine between their submission and the text of their tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .generation import Generation, TokenDelta
from .logprobs import TokenLogprob
from .scheduler import PlannedChunk


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A submitted step: its chunks, those whose last row is sampled, and those whose last hidden state is wanted."""

    chunks: list[PlannedChunk]
    sampling: list[PlannedChunk]
    embedding: list[PlannedChunk]

    def rows_of(self, chunks: list[PlannedChunk], values: Tensor) -> Tensor:
        """Those of the values, [chunks of this step], that belong to the sequences of other chunks, in their order."""
        if len(chunks) == len(self.chunks):
            return values
        wanted = {chunk.sequence.id for chunk in chunks}
        rows = [row for row, chunk in enumerate(self.chunks) if chunk.sequence.id in wanted]
        return values[torch.tensor(rows, device=values.device)]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that its request has taken and not yet said. `cached_tokens`: as of `TokenDelta`."""

    generation: Generation
    token: int
    logprob: TokenLogprob | None
    cached_tokens: int

    def say(self) -> TokenDelta:
        delta = self.generation.say(self.token, self.logprob)
        return replace(delta, cached_tokens=self.cached_tokens) if self.cached_tokens else delta
