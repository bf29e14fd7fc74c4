"""Runner over a transformers model: each step is one forward pass for every number of new tokens among its sequences.

Decodes are computed together, and so are prompts of equal length.
"""

from __future__ import annotations

import inspect
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..engine.runner import Batch, StepOutput
from .paged_cache import PagedCache, cache_argument, group_slots


@dataclass(frozen=True, slots=True)
class _Chunk:
    """New tokens of one sequence. `embeds`: the last one's hidden state is wanted, and no logits."""

    index: int
    tokens: list[int]
    begin: int
    table: list[int]
    embeds: bool


class TransformersRunner:
    """Runner over one model and its cache, one step at a time."""

    depth = 1
    stalled = False
    asynchronous = False

    def __init__(self, model: Any, cache: PagedCache, block_tokens: int, vocab_size: int) -> None:
        self._model = model
        self._cache = cache
        self._block_tokens = block_tokens
        self._vocab_size = vocab_size
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self._base_takes = frozenset(inspect.signature(model.base_model.forward).parameters)
        self._batches: deque[Batch] = deque()

    def submit(self, batch: Batch) -> None:
        self._batches.append(batch)

    def drop(self) -> None:
        self._batches.clear()

    @torch.inference_mode()
    def collect(self) -> StepOutput:
        batch = self._batches.popleft()
        groups: dict[tuple[int, bool], list[_Chunk]] = {}
        for chunk in _chunks(batch):
            groups.setdefault((len(chunk.tokens), chunk.embeds), []).append(chunk)
        logits: dict[int, Tensor] = {}
        embeddings: dict[int, Tensor] = {}
        for (_, embeds), chunks in groups.items():
            rows = self._forward(chunks, embeds)
            (embeddings if embeds else logits).update((one.index, row) for one, row in zip(chunks, rows, strict=True))
        ends = {row: index for index, row in enumerate(end - 1 for end in batch.starts[1:])}
        device = self._model.device
        empty = torch.empty(0, self._vocab_size, device=device)
        wanted = [logits[ends[row]] for row in batch.logits_rows]
        states = [embeddings[ends[row]] for row in batch.embedding_rows]
        return StepOutput(
            logits=torch.stack(wanted).float() if wanted else empty,
            embeddings=torch.stack(states).float() if states else None,
        )

    def _forward(self, chunks: list[_Chunk], embeds: bool) -> Tensor:
        """Last logits, or last hidden states, of each sequence: [sequences, width]."""
        device = self._model.device
        queries = len(chunks[0].tokens)
        begins = [chunk.begin for chunk in chunks]
        slots = group_slots([chunk.table for chunk in chunks], begins, queries, self._block_tokens)
        self._cache.group = slots.to(device)
        first = torch.tensor(begins)[:, None]
        column = torch.arange(slots.longest)
        inputs = {
            "input_ids": torch.tensor([chunk.tokens for chunk in chunks], device=device),
            "attention_mask": (column >= slots.longest - queries - first).long().to(device),
            "position_ids": (first + torch.arange(queries)).to(device),
            "use_cache": True,
            "logits_to_keep": 1,
        }
        called, takes = (self._model.base_model, self._base_takes) if embeds else (self._model, self._takes)
        inputs[cache_argument(takes)] = self._cache
        output = called(**{name: value for name, value in inputs.items() if name in takes})
        rows: Tensor = (output.last_hidden_state if embeds else output.logits)[:, -1]
        return rows


def _chunks(batch: Batch) -> list[_Chunk]:
    embedding = frozenset(batch.embedding_rows)
    return [
        _Chunk(index, batch.tokens[begin:end], batch.positions[begin], batch.tables[index], end - 1 in embedding)
        for index, (begin, end) in enumerate(zip(batch.starts, batch.starts[1:], strict=False))
    ]
