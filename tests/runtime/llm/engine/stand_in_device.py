"""A decoder that stands in for one on a GPU: its steps are asynchronous, and it alone knows some tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from fleetstart.runtime.llm.engine.runner import Batch, Decoder


class Device:
    """A decoder whose steps of decodes, or of at least `rows`, are asynchronous, and write their logits where those of
    the last one were."""

    def __init__(self, decoder: Decoder, fails_in: range = range(0), rows: int = 1 << 30) -> None:
        self._decoder = decoder
        self._fails_in = fails_in
        self._rows = rows
        self._logits = torch.empty(0)
        self.begun: list[Batch] = []
        self.asynchronous = False

    def forward(self, batch: Batch) -> Tensor:
        self.begun.append(batch)
        if len(self.begun) in self._fails_in:
            raise RuntimeError("the device is lost")
        self.asynchronous = len(batch.tokens) == len(batch.tables) or len(batch.tokens) >= self._rows
        self._logits.fill_(math.nan)
        self._logits = self._decoder.forward(with_known_tokens(batch)).clone()
        return self._logits

    def hidden(self, batch: Batch) -> Tensor:
        self.asynchronous = False
        return self._decoder.hidden(with_known_tokens(batch))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)

    def normed(self, hidden: Tensor) -> Tensor:
        return self._decoder.normed(hidden)


def with_known_tokens(batch: Batch) -> Batch:
    """The batch as the device has it."""
    if batch.device_tokens is None:
        return batch
    count = len(batch.device_tokens)
    assert not any(batch.tokens[:count])
    return replace(batch, tokens=batch.device_tokens.tolist() + batch.tokens[count:])
