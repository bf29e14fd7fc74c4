"""Inputs of a step's attention for the decoder in torch: which slots of the cache each sequence reads and writes.

Rows of sequences that decode, one a sequence, are one group, padded to the longest context; chunks of prompts are
groups of their own. What a step of decodes needs is computed on the device from positions and block tables alone, so
that it can be part of a CUDA graph (`decode_graphs`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from ...contract.weights.rope_config import Rope
from ..engine.runner import Batch
from .decode_kernels import DecodeKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Sequences whose attention is computed in one call.

    Shapes:  rows [sequences * queries], of the batch, None if they are all of it; slots [sequences, context] of the
             cache; for each width of a sliding window, and None, what is added to the scores,
             [sequences, 1, queries, context]: 0 where a query may look, and minus infinity elsewhere.
    """

    rows: Tensor | None
    slots: Tensor
    masks: dict[int | None, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decodes:
    """One token of each sequence, whose attention is computed by kernels of our own.

    Shapes:  positions [sequences]; tables [sequences, blocks].
    """

    kernels: DecodeKernels
    positions: Tensor
    tables: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """Inputs of every layer of one step: by rotary setting, cosines and signed sines [rows, 1, rotary_dim]; written
    slots [rows]; and either groups, or decodes for kernels."""

    turns: dict[Rope, tuple[Tensor, Tensor]]
    written: Tensor
    groups: list[Group]
    decodes: Decodes | None = None


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
            return self.of_decodes(*self.decode_tensors(batch), kernels)
        positions = torch.tensor(batch.positions)
        slots = [
            slots_of(table, batch.positions[end - 1] + 1, self.block_tokens)
            for table, end in zip(batch.tables, batch.starts[1:], strict=True)
        ]
        written = torch.cat([slots[s][batch.positions[start] :] for s, start in enumerate(batch.starts[:-1])])
        return StepTensors(
            turns=self._turns(positions.to(self.device)),
            written=written.to(self.device),
            groups=self._groups(batch, positions, slots),
        )

    def decode_tensors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Positions [sequences] and block tables [sequences, blocks], on the device."""
        counts = [position // self.block_tokens + 1 for position in batch.positions]
        tables = torch.zeros((len(counts), max(counts)), dtype=torch.long)
        for row, (table, count) in enumerate(zip(batch.tables, counts, strict=True)):
            tables[row, :count] = torch.tensor(table[:count])
        return torch.tensor(batch.positions, device=self.device), tables.to(self.device)

    def of_decodes(self, positions: Tensor, tables: Tensor, kernels: DecodeKernels | None) -> StepTensors:
        """The step of one token a sequence; computed on the device, without waiting for it.

        Shapes:  positions [sequences] of the tokens; tables [sequences, blocks], whatever stands behind a sequence's
                 own blocks.
        """
        blocks = tables.gather(1, positions.div(self.block_tokens, rounding_mode="floor")[:, None])[:, 0]
        written, turns = blocks * self.block_tokens + positions % self.block_tokens, self._turns(positions)
        if kernels is not None:
            decodes = Decodes(kernels=kernels, positions=positions, tables=tables)
            return StepTensors(turns=turns, written=written, groups=[], decodes=decodes)
        slots = tables[:, :, None] * self.block_tokens + torch.arange(self.block_tokens, device=self.device)
        slots = slots.flatten(1)
        places = torch.arange(slots.shape[1], device=self.device)
        # What is not written yet may be NaN, and no mask hides it: padding reads the sequence's own first slot.
        slots = torch.where(places <= positions[:, None], slots, slots[:, :1])
        masks = self._masks(places, positions[:, None, None, None])
        return StepTensors(turns=turns, written=written, groups=[Group(rows=None, slots=slots, masks=masks)])

    def _turns(self, positions: Tensor) -> dict[Rope, tuple[Tensor, Tensor]]:
        turns = {}
        for rope, frequencies in self.frequencies.items():
            angles = positions.float()[:, None, None] * frequencies
            cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
            # Signs as `rotated` needs them.
            turns[rope] = (torch.cat((cos, cos), -1).to(self.dtype), torch.cat((-sin, sin), -1).to(self.dtype))
        return turns

    def _groups(self, batch: Batch, positions: Tensor, slots: list[Tensor]) -> list[Group]:
        starts = batch.starts
        counts = [end - begin for begin, end in itertools.pairwise(starts)]
        decodes = [s for s, count in enumerate(counts) if count == 1]
        groups = [[s] for s, count in enumerate(counts) if count > 1]
        return [
            self._group(
                torch.cat([torch.arange(starts[s], starts[s + 1]) for s in members]),
                positions,
                [slots[s] for s in members],
            )
            for members in ([decodes] if decodes else []) + groups
        ]

    def _group(self, rows: Tensor, positions: Tensor, slots: list[Tensor]) -> Group:
        longest = max(len(one) for one in slots)
        padded = torch.stack(
            [torch.cat((one, one[:1].expand(longest - len(one)))) for one in slots]  # never read before written
        )
        limits = positions[rows].view(len(slots), 1, -1, 1).to(self.device)
        whole = len(rows) == len(positions)
        return Group(
            rows=None if whole else rows.to(self.device),
            slots=padded.to(self.device),
            masks=self._masks(torch.arange(longest, device=self.device), limits),
        )

    def _masks(self, places: Tensor, limits: Tensor) -> dict[int | None, Tensor]:
        before = places <= limits
        shown = {window: before if window is None else before & (places > limits - window) for window in self.windows}
        nothing = torch.zeros((), dtype=self.dtype, device=self.device)
        return {window: torch.where(one, nothing, -math.inf) for window, one in shown.items()}


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
