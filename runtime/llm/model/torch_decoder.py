"""Decoder in plain torch operations: the reference on the CPU, and the decoder on CUDA.

Keys and values are in one tensor of blocks; a step writes its own, and attends to each sequence's by its block table
(`torch_attention`). Steps of one row a sequence are computed by a graph on CUDA, where there is one (`decode_graphs`).

Of a model that is split over devices, it computes one rank's shard; `ShardGroup` adds up what the ranks have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...contract.weights.decoder_config import DecoderConfig
from ..engine.runner import Batch
from .cuda.decode_graphs import DecodeGraphs
from .cuda.decode_kernels import DecodeKernels, kernels_for, shape_for
from .int8_matrix import Int8Matrix, Matrix
from .layers import LayerWeights, StageWeights, finished, rms_norm
from .projections import Projections
from .rope import inverse_frequencies
from .torch_attention import TorchAttention
from .torch_steps import StepInputs, StepTensors, decodes_only, rotated, sent, slots_of

ASYNCHRONOUS_ROWS = 256
"""Rows of a step that take a GPU longer than their launch takes the host."""


class ShardGroup(Protocol):
    """The ranks of a model that is split over devices. Every rank makes the same calls in the same order."""

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' tensors, in every rank. May write to `partial`."""
        ...

    def own_rows(self, tokens: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Rows of the embedding's part that is here for these tokens, and a mask of the tokens that are not here."""
        ...

    def joined(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Logits of the whole vocabulary, [rows, vocab_size], from every rank's part of it, in the first rank; empty
        in the others."""
        ...


class TorchDecoder:
    """Layers of one stage, or one rank's shard of them, with their KV blocks.

    `forward` and `logits` are not thread-safe. `read_kv` and `write_kv` may run in other threads meanwhile: the cache
    is append-only, so no step changes keys and values of earlier ones.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: StageWeights,
        *,
        device: torch.device,
        dtype: torch.dtype,
        block_count: int,
        block_tokens: int,
        group: ShardGroup | None = None,
    ) -> None:
        """`group`: the ranks of a split model, whose `config` and `weights` are those of its shard here."""
        self.config = config
        self._ranks = group
        self.device = device
        self.dtype = dtype
        self.block_count = block_count
        self.block_tokens = block_tokens
        self._whole = len(weights.layers) == config.layer_count
        ends = weights.first + len(weights.layers)
        self._windows = config.windows[weights.first : ends]
        self._ropes = [config.rope_of(layer) for layer in range(weights.first, ends)]
        self._embedding = None if weights.embedding is None else self._move(weights.embedding)
        self._layers = [self._move_layer(layer) for layer in weights.layers]
        self._qkv = [_qkv_of(layer) for layer in self._layers]
        self._gate_up = [_gate_up_of(layer) for layer in self._layers]
        self._final_norm = None if weights.final_norm is None else self._move_norm(weights.final_norm)
        if weights.head is None:
            self._head = None
        else:
            self._head = self._embedding if weights.head is weights.embedding else self._move(weights.head)
        self._inputs = self._step_inputs()
        self._attends = TorchAttention(
            repeats=config.head_count // config.kv_head_count,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
        )
        # The factor is rounded to the dtype, as in training.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        # Never read before written: padding points at the sequence's own first slot. The last block is of no sequence:
        # a graph's unused rows write there.
        self._cache = torch.empty(
            (len(self._layers), 2, config.kv_head_count, (block_count + 1) * block_tokens, config.head_dim),
            dtype=dtype,
            device=device,
        )
        self.asynchronous = False
        """True after a step on CUDA that was a graph, or of many rows (`Decoder`)."""
        self._ends: deque[torch.cuda.Event] = deque()
        """Ends of the last steps that were no graphs."""
        self._compiling: Future[DecodeKernels | None] | None = None
        self._graphs: DecodeGraphs | None = None
        if device.type == "cuda":
            self._prepare_cuda()

    def _step_inputs(self) -> StepInputs:
        context, ropes = self.config.context_tokens, set(self._ropes)
        return StepInputs(
            device=self.device,
            dtype=self.dtype,
            block_tokens=self.block_tokens,
            windows=set(self._windows),
            frequencies={rope: inverse_frequencies(rope, context).to(self.device) for rope in ropes},
        )

    def _prepare_cuda(self) -> None:
        # cuDNN's attention compiles a plan for each new length of a prompt: 0.6 s on an H200.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if (shape := shape_for(self.config, self.dtype, self.block_tokens)) is not None:
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            self._compiling = kernels_for(torch.device("cuda", index), shape)
        if self._whole and self._ranks is None:
            self._graphs = DecodeGraphs(
                self._decode, self.device, block_tokens=self.block_tokens, spare_block=self.block_count,
                ready=self._settled,
            )  # fmt: skip

    @property
    def _kernels(self) -> DecodeKernels | None:
        """Kernels of decode steps; None where there are none, and as long as they are not compiled."""
        return self._compiling.result() if self._compiling is not None and self._compiling.done() else None

    def _settled(self) -> bool:
        return self._compiling is None or self._compiling.done()

    def _move(self, tensor: Matrix) -> Tensor:
        if isinstance(tensor, Int8Matrix):
            return tensor.dequantized(self.device, self.dtype)
        if self.device.type == "cuda" and tensor.device.type == "cpu":
            # Pageable memory would be copied by one thread, and the host would wait for it; converted over there.
            tensor = tensor.pin_memory().to(device=self.device, non_blocking=True)
        return tensor.to(device=self.device, dtype=self.dtype, non_blocking=True)

    def _move_norm(self, weight: Tensor) -> Tensor:
        """Zero-centred norms stay in fp32: beside the one, a small weight would be rounded away."""
        if self.config.zero_centred_norms:
            return weight.to(device=self.device, non_blocking=True)
        return self._move(weight)

    def _move_layer(self, layer: LayerWeights[Matrix]) -> LayerWeights[Tensor]:
        moved: dict[str, Tensor | None] = {}
        for field in fields(layer):
            tensor: Tensor | None = getattr(layer, field.name)
            move = self._move_norm if field.name.endswith("_norm") else self._move
            moved[field.name] = None if tensor is None else move(tensor)
        return LayerWeights(**moved)  # type: ignore[arg-type]

    @torch.inference_mode()
    def forward(self, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        """Runs the stage's layers over the batch.

        Shapes:  hidden [rows, hidden_size] from the stage before, None for the first stage.
                 Returns logits [len(batch.logits_rows), vocab_size] in fp32 if all layers are here,
                 hidden [rows, hidden_size] from a stage.
        """
        if (hidden is None) is not (self._embedding is not None):
            raise ValueError("the first stage takes tokens, the others hidden states")
        logits = self._graphs.logits(batch) if self._graphs is not None and decodes_only(batch) else None
        self.asynchronous = logits is not None or (self._graphs is not None and len(batch.tokens) >= ASYNCHRONOUS_ROWS)
        if logits is not None:
            return self._of_rows(logits, batch)
        with self._paced():
            if self._embedding is not None:
                hidden = self._embed(self._tokens(batch))
            assert hidden is not None
            hidden = self._through_layers(self._inputs.of_batch(batch, self._kernels), self._move(hidden))
            return self.logits(self._of_rows(hidden, batch)) if self._whole else hidden

    @contextmanager
    def _paced(self) -> Iterator[None]:
        """One step, which the host gives to a GPU while the one before is computed, but no earlier."""
        while len(self._ends) > 1:
            self._ends.popleft().synchronize()
        yield
        if self.device.type == "cuda":
            self._ends.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            self._ends[-1].record()

    def _tokens(self, batch: Batch) -> Tensor:
        [tokens] = sent([torch.tensor(batch.tokens)], self.device)
        if batch.device_tokens is not None:
            tokens[: len(batch.device_tokens)].copy_(batch.device_tokens)
        return tokens

    def _of_rows(self, values: Tensor, batch: Batch) -> Tensor:
        """Those of the rows whose logits are wanted."""
        if len(batch.logits_rows) == len(batch.tokens):
            return values
        return values[sent([torch.tensor(batch.logits_rows, dtype=torch.long)], self.device)[0]]

    def _decode(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        """Logits [sequences, vocab_size] of one token a sequence; waits for nothing (`StepInputs.of_decodes`)."""
        step = self._inputs.of_decodes(positions, tables, self._kernels)
        return self.logits(self._through_layers(step, self._embed(tokens)))

    @torch.inference_mode()
    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states [rows, hidden_size] after the last layer of a whole model, before the final norm."""
        self.asynchronous = False
        with self._paced():
            hidden = self._embed(self._tokens(batch))
            return self._through_layers(self._inputs.of_batch(batch, self._kernels), hidden)

    def _embed(self, tokens: Tensor) -> Tensor:
        assert self._embedding is not None
        if self._ranks is None:
            hidden = functional.embedding(tokens, self._embedding)
        else:
            rows, elsewhere = self._ranks.own_rows(tokens, self.config.vocab_size)
            hidden = self._ranks.sum(functional.embedding(rows, self._embedding).masked_fill(elsewhere[:, None], 0.0))
        return hidden if self._embedding_scale == 1.0 else hidden * self._embedding_scale

    def _through_layers(self, step: StepTensors, hidden: Tensor) -> Tensor:
        normed = self._norm(hidden, self._layers[0].attention_norm)
        for index, layer in enumerate(self._layers):
            attended = self._attention(layer, index, normed, step)
            hidden, normed = self._add(hidden, attended, layer.attention_output_norm, layer.ffn_norm)
            fed = self._feed_forward(layer, index, normed)
            last = index + 1 == len(self._layers)
            following = None if last else self._layers[index + 1].attention_norm
            hidden, normed = self._add(hidden, fed, layer.ffn_output_norm, following)
        return hidden

    def _add(
        self, hidden: Tensor, result: Tensor, output_norm: Tensor | None, norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Residual connection, with what a family does to a result before, and the norm behind it, if there is one."""
        if output_norm is not None:
            result = self._norm(result, output_norm)
        scale, kernels = self.config.residual_scale, self._kernels
        if scale == 1.0 and norm is not None and kernels is not None and kernels.adds(hidden, result, norm):
            return kernels.add_and_normalise(hidden, result, norm, self.config.norm_eps)
        hidden = hidden + result if scale == 1.0 else hidden + result * scale
        return hidden, hidden if norm is None else self._norm(hidden, norm)

    def _feed_forward(self, layer: LayerWeights[Tensor], index: int, normed: Tensor) -> Tensor:
        gate, up = self._gate_up[index](normed)
        silu, kernels = self.config.activation == "silu", self._kernels
        if kernels is not None and kernels.takes(gate, up):
            wide = kernels.apply_gates(gate, up, tanh_gelu=not silu)
        else:
            wide = (functional.silu(gate) if silu else functional.gelu(gate, approximate="tanh")) * up
        return self._summed(functional.linear(wide, layer.down, layer.down_bias))

    def _summed(self, partial: Tensor) -> Tensor:
        """The result of a matrix whose columns are divided among the ranks."""
        return partial if self._ranks is None else self._ranks.sum(partial)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Applies final norm and head, which the first stage has, to rows from the last stage.

        Shapes:  hidden [n, hidden_size]. Returns [n, vocab_size] in fp32.
        Errors:  ValueError if another stage is asked.
        """
        if self._head is None or self._final_norm is None:
            raise ValueError("the head belongs to the first stage")
        normed = self._norm(self._move(hidden), self._final_norm)
        logits = functional.linear(normed, self._head).float()
        if self._ranks is not None:
            logits = self._ranks.joined(logits, self.config.vocab_size)
        return finished(logits, self.config)

    @torch.inference_mode()
    def normed(self, hidden: Tensor) -> Tensor:
        """Applies the final norm, which the first stage has, to rows from the last stage.

        Shapes:  hidden [n, hidden_size]. Returns the same in fp32.
        Errors:  ValueError if another stage is asked.
        """
        if self._final_norm is None:
            raise ValueError("the final norm belongs to the first stage")
        return self._norm(self._move(hidden), self._final_norm).float()

    @torch.inference_mode()
    def read_kv(self, table: list[int], begin: int, end: int) -> bytes:
        """Keys and values of tokens `begin .. end - 1` of the sequence whose blocks are `table`, all layers.

        Shapes:  [layer][key, value][kv_head][token][head_dim] in the cache's dtype, so a layer is one piece.
        Errors:  ValueError, IndexError for tokens that the table or the pool has no room for.
        """
        cached = self._cache[:, :, :, self._cached(table, begin, end)]
        return cached.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()

    @torch.inference_mode()
    def write_kv(
        self, table: list[int], begin: int, end: int, first_layer: int, data: bytes | bytearray | memoryview
    ) -> None:
        """Writes keys and values from another decoder's `read_kv` into the layers from `first_layer` on.

        The tokens are some that no step reads yet.
        Errors:  ValueError, IndexError for tokens and layers that are not here, or data of another size; the cache
                 is as it was then.
        """
        slots = self._cached(table, begin, end)
        heads, head_dim, size_bytes = self.config.kv_head_count, self.config.head_dim, memoryview(data).nbytes
        layer_bytes = 2 * heads * len(slots) * head_dim * self.dtype.itemsize
        layers = size_bytes // layer_bytes if layer_bytes else 0
        if layers * layer_bytes != size_bytes or (not layers and layer_bytes):
            raise ValueError(f"{size_bytes} bytes of keys and values, a layer of {len(slots)} tokens has {layer_bytes}")
        if not 0 <= first_layer <= first_layer + layers <= len(self._layers):
            raise ValueError(f"keys and values of {layers} layers from layer {first_layer} on, of {len(self._layers)}")
        if not layers:
            return
        values = torch.tensor(np.frombuffer(data, np.uint8), device=self.device).view(self.dtype)
        values = values.view(layers, 2, heads, len(slots), head_dim)
        self._cache[first_layer : first_layer + layers].index_copy_(3, slots, values)

    def _cached(self, table: list[int], begin: int, end: int) -> Tensor:
        """Slots of tokens `[begin, end)` of a sequence."""
        room = len(table) * self.block_tokens
        if not 0 <= begin <= end <= room:
            raise ValueError(f"tokens {begin} to {end} of a table with room for {room}")
        for block in table[begin // self.block_tokens : -(-end // self.block_tokens)]:
            if not 0 <= block < self.block_count:
                raise IndexError(f"block {block} of a pool of {self.block_count}")
        return slots_of(table, end, self.block_tokens)[begin:].to(self.device)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        if (kernels := self._kernels) is not None and kernels.takes(hidden, weight):
            return kernels.normalise(hidden, weight, self.config.norm_eps)
        return rms_norm(hidden, weight, self.config.norm_eps)

    def _attention(self, layer: LayerWeights[Tensor], index: int, normed: Tensor, step: StepTensors) -> Tensor:
        config, cache = self.config, self._cache[index].flatten(0, 1)
        rows = normed.shape[0]
        query, key, value = (part.view(rows, -1, config.head_dim) for part in self._qkv[index](normed))
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = self._norm(query, layer.q_norm), self._norm(key, layer.k_norm)
        turns = step.turns[self._ropes[index]]
        if step.kernels is not None:
            query = step.kernels.rotate_and_store(query, key, value, turns, step.written, cache)
        else:
            turned = rotated(torch.cat((query, key), dim=1), *turns)
            query, key = turned[:, : config.head_count], turned[:, config.head_count :]
            cache.index_copy_(1, step.written, torch.cat((key, value), dim=1).transpose(0, 1))
        mixed = self._attends.over(query, cache, step, self._windows[index])
        return self._summed(functional.linear(mixed.reshape(rows, -1), layer.o, layer.o_bias))


def _qkv_of(layer: LayerWeights[Tensor]) -> Projections:
    return Projections((layer.q, layer.k, layer.v), (layer.q_bias, layer.k_bias, layer.v_bias))


def _gate_up_of(layer: LayerWeights[Tensor]) -> Projections:
    return Projections((layer.gate, layer.up), (layer.gate_bias, layer.up_bias))
