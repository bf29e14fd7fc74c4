"""Attention of a step over the cache, for the decoder in torch.

Rows that decode are computed together: by kernels of our own that read keys and values where they lie, or padded to the
longest context. Chunks of prompts are one call of FlashAttention (Dao, 2023), which torch has for half precision on
CUDA, over keys and values gathered one behind the other; elsewhere each is a call of its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .layers import capped
from .torch_steps import KernelDecodes, PackedChunks, PaddedDecodes, StepTensors, shown

FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_MOST_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchAttention:
    """Attention of one model. `repeats`: query heads that share a head of keys and values.

    Shapes of its methods:  query [rows, heads, head_dim], cache [2 * kv_heads, slots, head_dim]; the result has the
                            shape of `query`.
    """

    repeats: int
    scale: float
    softcap: float | None

    def over(self, query: Tensor, cache: Tensor, step: StepTensors, window: int | None) -> Tensor:
        """Attention of all rows of a step, whose own keys and values are in the cache."""
        counts = [step.decode_count, *(sum(chunks.row_counts) for chunks in step.chunks)]
        rows, *others = torch.split(query, counts)
        parts = [self._of_chunks(one, cache, chunks, window) for one, chunks in zip(others, step.chunks, strict=True)]
        if step.decodes is not None:
            parts.insert(0, self._of_decodes(rows, cache, step.decodes, window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _of_decodes(
        self, query: Tensor, cache: Tensor, decodes: KernelDecodes | PaddedDecodes, window: int | None
    ) -> Tensor:
        if isinstance(decodes, KernelDecodes):
            return decodes.kernels.attend(
                query, cache, decodes.positions, decodes.tables, window=window, scale=self.scale, softcap=self.softcap
            )
        (sequences, context), (_, heads, width), mask = decodes.slots.shape, query.shape, decodes.masks[window]
        gathered = cache.index_select(1, decodes.slots.view(-1)).view(2, -1, sequences, context, width)
        key, value = gathered.transpose(1, 2)
        # Heads that share keys are queries of one attention: nothing is repeated.
        grouped = query.reshape(sequences, heads // self.repeats, self.repeats, width)
        if self.softcap is not None:
            return self._capped(grouped, key, value, mask).reshape(query.shape)
        mask = mask.expand(-1, grouped.shape[1], self.repeats, -1)
        return scaled_dot_product_attention(grouped, key, value, mask, scale=self.scale).reshape(query.shape)

    def _of_chunks(self, query: Tensor, cache: Tensor, chunks: PackedChunks, window: int | None) -> Tensor:
        key, value = cache.index_select(1, chunks.slots).view(2, -1, len(chunks.slots), query.shape[-1])
        if self.softcap is None and flash_takes(query):
            return self._flash(query, key.transpose(0, 1), value.transpose(0, 1), chunks, window)
        parts = zip(
            torch.split(query, chunks.row_counts),
            torch.split(key, chunks.key_counts, dim=1),
            torch.split(value, chunks.key_counts, dim=1),
            strict=True,
        )
        return torch.cat([self._of_chunk(*part, window) for part in parts])

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, chunks: PackedChunks, window: int | None) -> Tensor:
        """Shapes: key and value [keys, kv_heads, head_dim]."""
        # By its operation, which torch has had since 2.6: `varlen_attn` came with 2.10, and its arguments change.
        mixed: Tensor = torch.ops.aten._flash_attention_forward(
            query, key, value, chunks.row_ends, chunks.key_ends, max(chunks.row_counts), max(chunks.key_counts),
            0.0, True, False,  # no dropout, causal, no mask for debugging
            scale=self.scale, window_size_left=-1 if window is None else window - 1, window_size_right=0,
        )[0]  # fmt: skip
        return mixed

    def _of_chunk(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        """Attention of one sequence's last tokens. Shapes: key and value [kv_heads, context, head_dim]."""
        rows, context = query.shape[0], key.shape[1]
        query, key, value = (
            query.transpose(0, 1)[None],
            key.repeat_interleave(self.repeats, dim=0)[None],
            value.repeat_interleave(self.repeats, dim=0)[None],
        )
        if self.softcap is None and rows == context and (window is None or context <= window):
            # A prompt from its beginning: kernels without a mask are quicker.
            mixed = scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
            return mixed[0].transpose(0, 1)
        places = torch.arange(context, device=query.device)
        mask = shown(places, places[context - rows :, None], window)
        if self.softcap is None:
            mixed = scaled_dot_product_attention(query, key, value, mask, scale=self.scale)
        else:
            hidden = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -torch.inf)
            mixed = self._capped(query, key, value, hidden)
        return mixed[0].transpose(0, 1)

    def _capped(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Attention with soft-capped scores, to which the mask is added then."""
        assert self.softcap is not None
        scores = capped((query @ key.transpose(2, 3)) * self.scale, self.softcap)
        return (scores + mask).softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def flash_takes(query: Tensor) -> bool:
    """Checks whether torch's FlashAttention computes these heads."""
    return (
        query.is_cuda and query.dtype in FLASH_DTYPES and query.shape[-1] <= FLASH_MOST_HEAD_DIM
        and not query.shape[-1] % 8 and _has_flash(query.device)
    )  # fmt: skip


@functools.cache
def _has_flash(device: torch.device) -> bool:
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)
