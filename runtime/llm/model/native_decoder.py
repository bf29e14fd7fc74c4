"""The decoder on the CPU: one native call a step over the weights as they lie in the segment.

What it computes is what `torch_decoder` computes; the arithmetic is fp32 whatever the weights are stored
as, and a row's result does not depend on the rows beside it: stages in a row give the same bits as the whole.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetstart.native import Decoder

from ..engine.runner import Batch
from .config import LlamaConfig
from .layers import LayerWeights, StageWeights
from .rope import inverse_frequencies

LANES = 16
"""Numbers in the widest vector: rows of every matrix must be whole vectors."""


def runs_natively(config: LlamaConfig) -> bool:
    """Whether the kernels take these shapes; every published Llama has them."""
    return not any(width % LANES for width in (config.hidden_size, config.ffn_size, config.head_dim))


class NativeDecoder:
    """Layers of one stage with their KV blocks. See `TorchDecoder`: the methods and their threads are the same."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: StageWeights,
        *,
        kv_dtype: str,
        block_count: int,
        block_tokens: int,
        threads: int,
        isa: str = "auto",
    ) -> None:
        self._hidden_size = config.hidden_size
        self._vocab_size = config.vocab_size
        self._whole = len(weights.layers) == config.layer_count
        self._decoder = Decoder(
            hidden_size=config.hidden_size,
            head_count=config.head_count,
            kv_head_count=config.kv_head_count,
            head_dim=config.head_dim,
            ffn_size=config.ffn_size,
            vocab_size=config.vocab_size,
            norm_eps=config.norm_eps,
            inverse_frequencies=_buffer(inverse_frequencies(config).numpy()),
            layers=[_in_order(layer) for layer in weights.layers],
            embedding=weights.embedding,
            final_norm=weights.final_norm,
            head=weights.head,
            kv_dtype=kv_dtype,
            block_count=block_count,
            block_tokens=block_tokens,
            threads=threads,
            isa=isa,
        )
        self._logits = torch.empty(0)

    @property
    def isa(self) -> str:
        """Which kernels run: "avx512", "avx2" or "generic"."""
        return self._decoder.isa

    def forward(self, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        """As `TorchDecoder.forward`; logits lie in a buffer that the next ones overwrite, hidden states do not."""
        if self._whole:
            output = self._room(len(batch.logits_rows))
        else:
            output = torch.empty(len(batch.positions), self._hidden_size)
        tables = np.full((len(batch.tables), max(map(len, batch.tables))), -1, dtype=np.int32)
        for table, blocks in zip(tables, batch.tables, strict=True):
            table[: len(blocks)] = blocks
        self._decoder.step(
            tokens=_int32(batch.tokens) if hidden is None else None,
            hidden=None if hidden is None else _rows(hidden),
            positions=_int32(batch.positions),
            starts=_int32(batch.starts),
            tables=_buffer(tables),
            logits_rows=_int32(batch.logits_rows) if self._whole else None,
            output=_buffer(output.numpy()),
        )
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """As `TorchDecoder.logits`; they lie in a buffer that the next ones overwrite."""
        output = self._room(len(hidden))
        self._decoder.logits(hidden=_rows(hidden), output=_buffer(output.numpy()))
        return output

    def read_kv(self, table: list[int], begin: int, end: int) -> bytes:
        """As `TorchDecoder.read_kv`."""
        return self._decoder.read_kv(_int32(table), begin, end)

    def write_kv(
        self, table: list[int], begin: int, end: int, first_layer: int, data: bytes | bytearray | memoryview
    ) -> None:
        """As `TorchDecoder.write_kv`."""
        self._decoder.write_kv(_int32(table), begin, end, first_layer, data)

    def _room(self, rows: int) -> Tensor:
        if self._logits.numel() < rows * self._vocab_size:
            self._logits = torch.empty(rows * self._vocab_size)
        return self._logits[: rows * self._vocab_size].view(rows, self._vocab_size)


def _buffer(array: Any) -> memoryview:
    """numpy's types tell of buffers from Python 3.12 on only; its arrays are some in 3.11 too."""
    return memoryview(array)


def _rows(hidden: Tensor) -> memoryview:
    return _buffer(hidden.to(torch.float32).contiguous().numpy())


def _int32(values: list[int]) -> memoryview:
    return _buffer(np.array(values, dtype=np.int32))


def _in_order(layer: LayerWeights) -> list[Tensor]:
    return [getattr(layer, field.name) for field in fields(layer)]
