"""Layers of a model: gathers a stage's tensors by their Hugging Face names, and checks their shapes.

Of a model that is split over several devices, only the rank's part of a tensor is read, as views.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ...contract.errors import CheckpointInvalid
from ...contract.weights.decoder_config import DecoderConfig
from ...contract.weights.quantization import SCALE_SUFFIX
from ...weights.lora import AdaptedWeights
from ...weights.tensor_mapping import TensorMapping
from .int8_matrix import Int8Matrix, Matrix
from .shard import WHOLE, Shard
from .weights import ModelWeights

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
M = TypeVar("M", bound=Matrix)
"""Matrices as they are stored, or tensors alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights(Generic[M]):
    """Tensors of one layer; matrices are [out, in]. Norms multiply by their weight as it is here; those of families
    with zero-centred norms are fp32, with the one added. What a family lacks is None."""

    attention_norm: Tensor
    q: M
    k: M
    v: M
    o: M
    ffn_norm: Tensor
    gate: M
    up: M
    down: M
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    attention_output_norm: Tensor | None = None
    ffn_output_norm: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWeights:
    """Tensors of one stage: layers `first, first + 1, ...`, and in the first stage both ends of the model."""

    first: int
    embedding: Tensor | None
    layers: list[LayerWeights[Matrix]]
    final_norm: Tensor | None
    head: Tensor | None


def gather(weights: ModelWeights, config: DecoderConfig, first: int, end: int, shard: Shard = WHOLE) -> StageWeights:
    """Gathers layers `first .. end - 1`, waiting for their tensors in the order in which they run; of each, the part
    that `shard` computes with. `config` is that of the whole model.

    The first stage has both ends of the model (`contract.weights.stage` says why), so that tied ones are one tensor.

    Errors: CheckpointInvalid, naming the tensor that is missing or has another shape.
    """
    if not 0 <= first < end <= config.layer_count:
        raise ValueError(f"layers {first} to {end} of {config.layer_count}")
    embedding = _vocabulary(weights, EMBEDDING, config, shard) if first == 0 else None
    layers = [_layer(weights, config, layer, shard) for layer in range(first, end)]
    return StageWeights(
        first=first,
        embedding=embedding,
        layers=layers,
        final_norm=None if embedding is None else _norm(weights, config, "model.norm", config.hidden_size),
        head=None if embedding is None else _head(weights, config, embedding, shard),
    )


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in the weight's dtype, with the mean in fp32 for every dtype, as in training.

    Shapes:  hidden [..., width], weight [width]. Returns the shape and dtype of `hidden`.
    """
    if hidden.is_cuda and weight.dtype == hidden.dtype:  # one kernel instead of six
        return functional.rms_norm(hidden, weight.shape, weight, eps)
    wide = hidden.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale).to(weight.dtype)).to(hidden.dtype)


def finished(logits: Tensor, config: DecoderConfig) -> Tensor:
    """Logits with the family's factor and cap."""
    if config.logits_scale != 1.0:
        logits = logits * config.logits_scale
    return logits if config.logits_softcap is None else capped(logits, config.logits_softcap)


def capped(values: Tensor, cap: float) -> Tensor:
    return torch.tanh(values / cap) * cap


def _vocabulary(weights: ModelWeights, name: str, config: DecoderConfig, shard: Shard) -> Tensor:
    return _tensor(weights, name, (config.vocab_size, config.hidden_size), rows=_slice(shard, config.vocab_size))


def _head(weights: ModelWeights, config: DecoderConfig, embedding: Tensor, shard: Shard) -> Tensor:
    """The head; a tied one is the embedding's tensor itself, so that it is moved and converted once."""
    if not config.tied_embeddings:
        return _vocabulary(weights, HEAD, config, shard)
    if isinstance(weights, AdaptedWeights) and not weights.changed.isdisjoint((HEAD, EMBEDDING)):
        # An adapter that was trained on one of the two changes only that one, as in PEFT.
        changed, name = (weights, HEAD) if HEAD in weights.changed else (weights.base, EMBEDDING)
        return _vocabulary(changed, name, config, shard)
    return embedding


def _layer(weights: ModelWeights, config: DecoderConfig, layer: int, shard: Shard) -> LayerWeights[Matrix]:
    at = f"model.layers.{layer}."
    hidden, q_width, kv_width, ffn = (
        config.hidden_size,
        config.head_count * config.head_dim,
        config.kv_width,
        config.ffn_size,
    )

    def norm(name: str, width: int = hidden, *, here: bool = True) -> Tensor | None:
        return _norm(weights, config, at + name, width) if here else None

    def rows(name: str, height: int) -> Matrix:
        return _matrix(weights, config, f"{at}{name}.weight", (height, hidden), rows=_slice(shard, height))

    def columns(name: str, width: int) -> Matrix:
        return _matrix(weights, config, f"{at}{name}.weight", (hidden, width), columns=_slice(shard, width))

    def bias(name: str, width: int, here: bool) -> Tensor | None:
        return _tensor(weights, f"{at}{name}.bias", (width,), rows=_slice(shard, width)) if here else None

    def bias_of_sum(name: str, here: bool) -> Tensor | None:
        return _tensor(weights, f"{at}{name}.bias", (hidden,)) if here and shard.first else None

    if config.fused_projections:
        q, k, v = _split(weights, config, at + "self_attn.qkv_proj", [q_width, kv_width, kv_width], shard)
        gate, up = _split(weights, config, at + "mlp.gate_up_proj", [ffn, ffn], shard)
    else:
        q, k, v = (
            rows("self_attn.q_proj", q_width), rows("self_attn.k_proj", kv_width), rows("self_attn.v_proj", kv_width)
        )  # fmt: skip
        gate, up = rows("mlp.gate_proj", ffn), rows("mlp.up_proj", ffn)
    # The norm that Llama names for what it follows is, in families with norms of outputs, such a one.
    ffn_norm = "pre_feedforward_layernorm" if config.output_norms else "post_attention_layernorm"
    return LayerWeights(
        attention_norm=_norm(weights, config, at + "input_layernorm", hidden),
        q=q,
        k=k,
        v=v,
        o=columns("self_attn.o_proj", q_width),
        ffn_norm=_norm(weights, config, at + ffn_norm, hidden),
        gate=gate,
        up=up,
        down=columns("mlp.down_proj", ffn),
        q_bias=bias("self_attn.q_proj", q_width, config.qkv_bias),
        k_bias=bias("self_attn.k_proj", kv_width, config.qkv_bias),
        v_bias=bias("self_attn.v_proj", kv_width, config.qkv_bias),
        o_bias=bias_of_sum("self_attn.o_proj", config.output_bias),
        gate_bias=bias("mlp.gate_proj", ffn, config.ffn_bias),
        up_bias=bias("mlp.up_proj", ffn, config.ffn_bias),
        down_bias=bias_of_sum("mlp.down_proj", config.ffn_bias),
        q_norm=norm("self_attn.q_norm", config.head_dim, here=config.query_key_norms),
        k_norm=norm("self_attn.k_norm", config.head_dim, here=config.query_key_norms),
        attention_output_norm=norm("post_attention_layernorm", here=config.output_norms),
        ffn_output_norm=norm("post_feedforward_layernorm", here=config.output_norms),
    )


def _norm(weights: ModelWeights, config: DecoderConfig, name: str, width: int) -> Tensor:
    weight = _tensor(weights, f"{name}.weight", (width,))
    return weight.float() + 1.0 if config.zero_centred_norms else weight


def _split(weights: ModelWeights, config: DecoderConfig, name: str, heights: list[int], shard: Shard) -> list[Matrix]:
    """Views of the matrices that are stored as one."""
    shape, begin = (sum(heights), config.hidden_size), 0
    views: list[Matrix] = []
    for height in heights:
        part = shard.part(height)
        rows = slice(begin + part.start, begin + part.stop)
        views.append(_matrix(weights, config, f"{name}.weight", shape, rows=rows))
        begin += height
    return views


def _slice(shard: Shard, size: int) -> slice | None:
    return None if shard.whole else shard.part(size)


def _matrix(
    weights: ModelWeights,
    config: DecoderConfig,
    name: str,
    shape: tuple[int, int],
    *,
    rows: slice | None = None,
    columns: slice | None = None,
) -> Matrix:
    """A matrix of that shape, or some of its rows or columns; one in int8 with the factors of its rows."""
    matrix = _read(weights, name, shape, rows=rows, columns=columns)
    if matrix.dtype != torch.int8 or not config.int8_matrices:
        return _floating(matrix, name)
    scale = _floating(_read(weights, name + SCALE_SUFFIX, (shape[0], 1), rows=rows), name + SCALE_SUFFIX)
    return Int8Matrix(matrix, scale.float().reshape(-1))


def _tensor(weights: ModelWeights, name: str, shape: tuple[int, ...], *, rows: slice | None = None) -> Tensor:
    return _floating(_read(weights, name, shape, rows=rows), name)


def _floating(tensor: Tensor, name: str) -> Tensor:
    if not tensor.is_floating_point() or tensor.element_size() not in (2, 4):
        raise CheckpointInvalid(f"tensor {name} is {tensor.dtype}: store fp16, bf16 or fp32")
    return tensor


def _read(
    weights: ModelWeights,
    name: str,
    shape: tuple[int, ...],
    *,
    rows: slice | None = None,
    columns: slice | None = None,
) -> Tensor:
    """A tensor of that shape, or some of its rows or columns, of which nothing else is read."""
    try:
        stored = tuple(weights.entry(name).shape) if isinstance(weights, TensorMapping) else None
        if rows is None or stored != shape:
            tensor = weights[name]
        else:
            assert isinstance(weights, TensorMapping)
            tensor = weights.rows(name, rows.start, rows.stop)
    except KeyError as error:
        raise CheckpointInvalid(f"the checkpoint has no tensor {name}") from error
    if (stored or tuple(tensor.shape)) != shape:
        raise CheckpointInvalid(
            f"tensor {name} has shape {list(stored or tensor.shape)}, config.json requires {list(shape)}"
        )
    if rows is not None and stored is None:
        tensor = tensor[rows]
    if columns is not None:
        tensor = tensor[:, columns]
        if isinstance(weights, AdaptedWeights) and name in weights.changed:
            tensor = tensor.clone()  # the whole matrix was computed, and is not kept for a part of it
    return tensor
