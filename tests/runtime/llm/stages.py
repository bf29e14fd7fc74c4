"""Decoders of a few layers each, called in a row, and sequences for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from fleetstart.runtime.llm.engine.runner import Batch
from fleetstart.runtime.llm.model.native_decoder import NativeDecoder
from fleetstart.runtime.llm.model.torch_decoder import TorchDecoder
from tests.runtime.llm.batches import Piece, batch_of, some_tokens
from tests.runtime.llm.models import BLOCK_TOKENS, Checkpoint, config_of, stage_of

LAYERS = 5
BLOCKS = 48
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
AnyDecoder = NativeDecoder | TorchDecoder
cuts_of_the_layers = st.sets(st.integers(1, LAYERS - 1))


def stage(
    kind: str, weights: Checkpoint, first: int = 0, end: int | None = None, *, kv: str = "fp32", threads: int = 1
) -> AnyDecoder:
    config, tensors = config_of(weights), stage_of(weights, first, end)
    if kind == "torch":
        return TorchDecoder(
            config, tensors,
            device=torch.device("cpu"), dtype=DTYPES[kv], block_count=BLOCKS, block_tokens=BLOCK_TOKENS,
        )  # fmt: skip
    return NativeDecoder(
        config, tensors,
        kv_dtype=kv, block_count=BLOCKS, block_tokens=BLOCK_TOKENS, threads=threads, isa=kind,
    )  # fmt: skip


class Pipeline:
    """Stages that are called one after the other; the first ends what the last gives back."""

    def __init__(self, kind: str, weights: Checkpoint, cuts: set[int], **options: Any) -> None:
        layers = config_of(weights).layer_count
        self.firsts, self.ends = [0, *sorted(cuts)], [*sorted(cuts), layers]
        self.stages = [
            stage(kind, weights, first, end, **options) for first, end in zip(self.firsts, self.ends, strict=True)
        ]

    def forward(self, batch: Batch) -> Tensor:
        if len(self.stages) == 1:
            return self.stages[0].forward(batch)
        hidden: Tensor | None = None
        for one in self.stages:
            hidden = one.forward(batch, hidden)
        assert hidden is not None
        return self.stages[0].logits(hidden[batch.logits_rows])


class Sequences:
    """Some sequences that are computed together: prompts in chunks, then token after token."""

    def __init__(self, lengths: list[int], chunk: int, *, seed: int = 0) -> None:
        self.tokens = [some_tokens(length + 12, seed + number) for number, length in enumerate(lengths)]
        self.done = [0] * len(lengths)
        self.lengths, self.chunk = lengths, chunk
        self.tables = [list(range(5 * n + 4, 5 * n - 1, -1)) for n in range(len(lengths))]

    def batch(self) -> Batch:
        """The next step of each: a chunk of its prompt, or one token."""
        pieces: list[Piece] = []
        for number, begin in enumerate(self.done):
            left = self.lengths[number] - begin
            end = begin + (min(self.chunk, left) if left > 0 else 1)
            pieces.append((self.tokens[number][begin:end], begin, self.tables[number]))
            self.done[number] = end
        return batch_of(pieces)

    def batches(self, count: int) -> Iterator[Batch]:
        return (self.batch() for _ in range(count))


some_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=4)


# ── the cache, from one decoder to another ─────────────────────────────────────────────────────────


def hand_over(pipeline: Pipeline, sequences: Sequences, to: AnyDecoder, split: int) -> None:
    """All that the stages hold, to other blocks of the whole decoder: some in one go, the rest layer by layer."""
    moved = [[BLOCKS - 1 - block for block in blocks] for blocks in sequences.tables]
    for blocks, target, count in zip(sequences.tables, moved, sequences.done, strict=True):
        middle = min(split, count)
        for one, first, end in zip(pipeline.stages, pipeline.firsts, pipeline.ends, strict=True):
            to.write_kv(target, 0, middle, first, one.read_kv(blocks, 0, middle))
            data = memoryview(one.read_kv(blocks, middle, count))
            layer_bytes = len(data) // (end - first)
            for layer in range(end - first):
                piece = data[layer * layer_bytes : (layer + 1) * layer_bytes]
                to.write_kv(target, middle, count, first + layer, piece)
    sequences.tables = moved
