"""Native decoder for the CPU: one native call a step, directly over the weights in the segment.

It computes the same as `torch_decoder`, in fp32 for every stored dtype unless it is told to multiply in bf16, and a
row's result does not depend on other rows: consecutive stages give the same bits as the whole model.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetstart.native import Decoder

from ...contract.weights.decoder_config import DecoderConfig
from ..engine.runner import Batch
from .int8_matrix import Int8Matrix, Matrix
from .layers import LayerWeights, StageWeights, finished, rms_norm
from .rope import inverse_frequencies


class NativeDecoder:
    """Layers of one stage with their KV blocks. Methods and their threads are those of `TorchDecoder`."""

    asynchronous = False

    def __init__(
        self,
        config: DecoderConfig,
        weights: StageWeights,
        *,
        kv_dtype: str,
        block_count: int,
        block_tokens: int,
        threads: int,
        isa: str = "auto",
    ) -> None:
        """`isa`: as of `native.Decoder`."""
        ends = weights.first + len(weights.layers)
        ropes = (config.rope, config.local_rope or config.rope)
        self._config = config
        self._hidden_size = config.hidden_size
        self._norm_eps = config.norm_eps
        self._final_norm = weights.final_norm
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
            inverse_frequencies=[_buffer(inverse_frequencies(rope, config.context_tokens).numpy()) for rope in ropes],
            rotary_factors=[rope.attention_factor for rope in ropes],
            layers=[_in_order(layer) for layer in weights.layers],
            windows=[window or 0 for window in config.windows[weights.first : ends]],
            turns=[ropes.index(config.rope_of(layer)) for layer in range(weights.first, ends)],
            embedding=weights.embedding,
            final_norm=weights.final_norm,
            head=weights.head,
            attention_scale=config.attention_scale,
            attention_softcap=config.attention_softcap or 0.0,
            embedding_scale=config.embedding_scale,
            residual_scale=config.residual_scale,
            gelu=config.activation == "gelu_tanh",
            kv_dtype=kv_dtype,
            block_count=block_count,
            block_tokens=block_tokens,
            threads=threads,
            isa=isa,
        )
        self._logits = torch.empty(0)

    @property
    def isa(self) -> str:
        """Name of the kernels in use: "amx", "avx512", "avx2" or "generic"."""
        return self._decoder.isa

    def forward(self, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        """Same as `TorchDecoder.forward`; logits are valid until the next call, hidden states longer."""
        if not self._whole:
            return self._step(batch, hidden)
        logits = self._logits_buffer(len(batch.logits_rows))
        self._run(batch, hidden, logits, logits_rows=batch.logits_rows)
        return finished(logits, self._config)

    def hidden(self, batch: Batch) -> Tensor:
        """Same as `TorchDecoder.hidden`."""
        return self._step(batch, None)

    def _step(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        output = torch.empty(len(batch.positions), self._hidden_size)
        self._run(batch, hidden, output, logits_rows=None)
        return output

    def _run(self, batch: Batch, hidden: Tensor | None, output: Tensor, *, logits_rows: list[int] | None) -> None:
        tables = np.full((len(batch.tables), max(map(len, batch.tables))), -1, dtype=np.int32)
        for table, blocks in zip(tables, batch.tables, strict=True):
            table[: len(blocks)] = blocks
        self._decoder.step(
            tokens=_int32(batch.tokens) if hidden is None else None,
            hidden=None if hidden is None else _rows(hidden),
            positions=_int32(batch.positions),
            starts=_int32(batch.starts),
            tables=_buffer(tables),
            logits_rows=None if logits_rows is None else _int32(logits_rows),
            output=_buffer(output.numpy()),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Same as `TorchDecoder.logits`; valid until the next call."""
        output = self._logits_buffer(len(hidden))
        self._decoder.logits(hidden=_rows(hidden), output=_buffer(output.numpy()))
        return finished(output, self._config)

    def normed(self, hidden: Tensor) -> Tensor:
        """Same as `TorchDecoder.normed`."""
        if self._final_norm is None:
            raise ValueError("the final norm belongs to the first stage")
        return rms_norm(hidden, self._final_norm.float(), self._norm_eps)

    def read_kv(self, table: list[int], begin: int, end: int) -> bytes:
        """Same as `TorchDecoder.read_kv`."""
        return self._decoder.read_kv(_int32(table), begin, end)

    def write_kv(
        self, table: list[int], begin: int, end: int, first_layer: int, data: bytes | bytearray | memoryview
    ) -> None:
        """Same as `TorchDecoder.write_kv`."""
        self._decoder.write_kv(_int32(table), begin, end, first_layer, data)

    def _logits_buffer(self, rows: int) -> Tensor:
        if self._logits.numel() < rows * self._vocab_size:
            self._logits = torch.empty(rows * self._vocab_size)
        return self._logits[: rows * self._vocab_size].view(rows, self._vocab_size)


def _buffer(array: Any) -> memoryview:
    """Casts an array to Buffer, which numpy's types declare from Python 3.12 on."""
    return memoryview(array)


def _rows(hidden: Tensor) -> memoryview:
    return _buffer(hidden.to(torch.float32).contiguous().numpy())


def _int32(values: list[int]) -> memoryview:
    return _buffer(np.array(values, dtype=np.int32))


def _in_order(layer: LayerWeights[Matrix]) -> list[Tensor | tuple[Tensor, Tensor] | None]:
    stored = (getattr(layer, field.name) for field in fields(layer))
    return [(one.weight, one.scale) if isinstance(one, Int8Matrix) else one for one in stored]
