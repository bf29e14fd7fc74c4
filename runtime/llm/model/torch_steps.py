"""Inputs of a step's attention for the decoder in torch: which slots of the cache each sequence reads and writes.

Sequences of one row at a batch's beginning decode; the others, chunks of prompts, are packed one behind the other. What
decodes need is computed on the device from positions and block tables alone, so that a step of them can be part of a
CUDA graph (`decode_graphs`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...contract.weights.rope_config import Rope
from ..engine.runner import Batch
from .cuda.decode_kernels import DecodeKernels

GATHERED_KEYS = 16384
"""Keys of a layer that are gathered at a time, or those of one sequence: 256 MiB with 32 heads of 128 numbers in half
precision. Prompts that share a prefix have it once in the cache, but each has its own copy where it is gathered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelDecodes:
    """One token of each sequence, whose attention is computed by kernels of our own.

    Shapes:  positions [sequences]; tables [sequences, blocks].
    """

    kernels: DecodeKernels
    positions: Tensor
    tables: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedDecodes:
    """One token of each sequence, whose keys are gathered and padded to the longest context.

    Shapes:  slots [sequences, context] of the cache; for each width of a sliding window, and None, what is added to the
             scores, [sequences, 1, 1, context]: 0 where a query may look, and minus infinity elsewhere.
    """

    slots: Tensor
    masks: dict[int | None, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedChunks:
    """Consecutive tokens of some sequences, the last ones of their contexts: rows and keys, one behind the other.

    Shapes:  slots [keys] of the cache; row_ends and key_ends [sequences + 1] in int32, from 0 on, and the same as
             lists.
    """

    slots: Tensor
    row_ends: Tensor
    key_ends: Tensor
    row_counts: list[int]
    key_counts: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """Inputs of every layer of one step: by rotary setting, cosines and signed sines [rows, 1, rotary_dim]; written
    slots [rows]; and what the attention of the first rows reads, which decode, and of the others, in their order.
    `kernels` rotate and store all rows."""

    turns: dict[Rope, tuple[Tensor, Tensor]]
    written: Tensor
    kernels: DecodeKernels | None
    decode_count: int
    decodes: KernelDecodes | PaddedDecodes | None
    chunks: tuple[PackedChunks, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Makes the inputs of steps. `frequencies`: inverse frequencies [rotary_dim / 2] on the device."""

    device: torch.device
    dtype: torch.dtype
    block_tokens: int
    windows: Collection[int | None]
    frequencies: dict[Rope, Tensor]

    def of_batch(self, batch: Batch, kernels: DecodeKernels | None) -> StepTensors:
        if decodes_only(batch):
            tensors = torch.tensor(batch.positions), _tables(batch, len(batch.tables), self.block_tokens)
            positions, tables = sent(tensors, self.device)
            return self.of_decodes(positions, tables, kernels)
        count = leading_decodes(batch)
        chunk_slots = [
            slots_of(table, batch.positions[end - 1] + 1, self.block_tokens)
            for table, end in zip(batch.tables[count:], batch.starts[count + 1 :], strict=True)
        ]
        decode_slots = [
            table[position // self.block_tokens] * self.block_tokens + position % self.block_tokens
            for table, position in zip(batch.tables[:count], batch.positions[:count], strict=True)
        ]
        own = [one[batch.positions[start] :] for one, start in zip(chunk_slots, batch.starts[count:-1], strict=True)]
        packs = [(own[begin:end], chunk_slots[begin:end]) for begin, end in _gathered_together(chunk_slots)]
        counts = [[[len(one) for one in slots] for slots in pack] for pack in packs]
        positions, tables, written, *packed = sent(
            (
                torch.tensor(batch.positions),
                _tables(batch, count, self.block_tokens),
                torch.cat((torch.tensor(decode_slots, dtype=torch.long), *own)),
                *(torch.cat(slots) for _, slots in packs),
                *(torch.tensor([[0, *itertools.accumulate(ends)] for ends in pack]) for pack in counts),
            ),
            self.device,
        )
        return StepTensors(
            turns=self._turns(positions),
            written=written,
            kernels=kernels,
            decode_count=count,
            decodes=self._decodes(positions[:count], tables, kernels) if count else None,
            chunks=tuple(
                itertools.starmap(_packed, zip(packed[: len(packs)], packed[len(packs) :], counts, strict=True))
            ),
        )

    def of_decodes(self, positions: Tensor, tables: Tensor, kernels: DecodeKernels | None) -> StepTensors:
        """The step of one token a sequence; computed on the device, without waiting for it.

        Shapes:  positions [sequences] of the tokens; tables [sequences, blocks], whatever stands behind a sequence's
                 own blocks.
        """
        blocks = tables.gather(1, positions.div(self.block_tokens, rounding_mode="floor")[:, None])[:, 0]
        return StepTensors(
            turns=self._turns(positions),
            written=blocks * self.block_tokens + positions % self.block_tokens,
            kernels=kernels,
            decode_count=len(positions),
            decodes=self._decodes(positions, tables, kernels),
        )

    def _decodes(
        self, positions: Tensor, tables: Tensor, kernels: DecodeKernels | None
    ) -> KernelDecodes | PaddedDecodes:
        if kernels is not None:
            return KernelDecodes(kernels=kernels, positions=positions, tables=tables)
        slots = tables[:, :, None] * self.block_tokens + torch.arange(self.block_tokens, device=self.device)
        slots = slots.flatten(1)
        places = torch.arange(slots.shape[1], device=self.device)
        # What is not written yet may be NaN, and no mask hides it: padding reads the sequence's own first slot.
        slots = torch.where(places <= positions[:, None], slots, slots[:, :1])
        limits = positions[:, None, None, None]
        nothing = torch.zeros((), dtype=self.dtype, device=self.device)
        return PaddedDecodes(
            slots=slots,
            masks={window: torch.where(shown(places, limits, window), nothing, -math.inf) for window in self.windows},
        )

    def _turns(self, positions: Tensor) -> dict[Rope, tuple[Tensor, Tensor]]:
        turns = {}
        for rope, frequencies in self.frequencies.items():
            angles = positions.float()[:, None, None] * frequencies
            cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
            # Signs as `rotated` needs them.
            turns[rope] = (torch.cat((cos, cos), -1).to(self.dtype), torch.cat((-sin, sin), -1).to(self.dtype))
        return turns


def sent(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of tensors of one type on the device, which go there together; a GPU is not waited for."""
    whole = torch.cat([tensor.flatten() for tensor in tensors])
    if device.type == "cuda":
        whole = whole.pin_memory()  # torch hands this memory out again when the copy is done
    parts = torch.split(whole.to(device, non_blocking=True), [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _packed(slots: Tensor, ends: Tensor, counts: list[list[int]]) -> PackedChunks:
    (row_ends, key_ends), (row_counts, key_counts) = ends.to(torch.int32), counts
    return PackedChunks(slots=slots, row_ends=row_ends, key_ends=key_ends, row_counts=row_counts, key_counts=key_counts)


def _gathered_together(slots: list[Tensor]) -> list[tuple[int, int]]:
    """Ranges of sequences of at most GATHERED_KEYS slots together, or of one sequence."""
    begins, keys = list[int](), GATHERED_KEYS
    for place, one in enumerate(slots):
        keys += len(one)
        if keys > GATHERED_KEYS:
            begins.append(place)
            keys = len(one)
    return list(itertools.pairwise([*begins, len(slots)]))


def _tables(batch: Batch, count: int, block_tokens: int) -> Tensor:
    """Block tables [count, blocks] of the first sequences, as far as their last positions need them."""
    owned = [position // block_tokens + 1 for position in batch.positions[:count]]
    tables = torch.zeros((count, max(owned, default=0)), dtype=torch.long)
    rows = tables.numpy()
    for row, (table, own) in enumerate(zip(batch.tables[:count], owned, strict=True)):
        rows[row, :own] = table[:own]
    return tables


def shown(places: Tensor, limits: Tensor, window: int | None) -> Tensor:
    """Mask of the places that queries at the positions `limits` look at; the two are broadcast."""
    before = places <= limits
    return before if window is None else before & (places > limits - window)


def leading_decodes(batch: Batch) -> int:
    """Sequences at the batch's beginning that have one row each."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[1] - pair[0] == 1, itertools.pairwise(batch.starts)))


def decodes_only(batch: Batch) -> bool:
    """Checks whether every sequence has one row."""
    return len(batch.tokens) == len(batch.tables)


def slots_of(table: list[int], context: int, block_tokens: int) -> Tensor:
    """Slots [context] of a sequence's positions in the cache."""
    blocks = torch.tensor(table, dtype=torch.long)[:, None] * block_tokens
    return (blocks + torch.arange(block_tokens)).view(-1)[:context]


def rotated(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary embedding in the Hugging Face layout: the first half of a head's rotated numbers pairs with the second,
    and the others stay.

    Shapes:  heads [rows, heads, head_dim]; cos and signed_sin [rows, 1, rotary_dim], the sines of the first half
             negative.
    """
    width = cos.shape[-1]
    turning = heads[..., :width]
    turned = torch.addcmul(turning * cos, turning.roll(width // 2, -1), signed_sin)
    return torch.cat((turned, heads[..., width:]), dim=-1) if width < heads.shape[-1] else turned
