"""Layers of a Llama model: gathers a stage's tensors by their Hugging Face names, and checks their shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...contract.errors import CheckpointInvalid
from ...contract.weights.llama_config import LlamaConfig
from ...weights.lora import AdaptedWeights
from .weights import ModelWeights

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Tensors of one layer; matrices are [out, in]."""

    attention_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    ffn_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWeights:
    """Tensors of one stage: layers `first, first + 1, ...`, and in the first stage both ends of the model."""

    first: int
    embedding: Tensor | None
    layers: list[LayerWeights]
    final_norm: Tensor | None
    head: Tensor | None


def gather(weights: ModelWeights, config: LlamaConfig, first: int, end: int) -> StageWeights:
    """Gathers layers `first .. end - 1`, waiting for their tensors in the order in which they run.

    The first stage has both ends of the model (`contract.weights.stage` says why), so that tied ones are one tensor.

    Errors: CheckpointInvalid, naming the tensor that is missing or has another shape.
    """
    if not 0 <= first < end <= config.layer_count:
        raise ValueError(f"layers {first} to {end} of {config.layer_count}")
    table = (config.vocab_size, config.hidden_size)
    embedding = _tensor(weights, EMBEDDING, table) if first == 0 else None
    layers = [_layer(weights, config, layer) for layer in range(first, end)]
    return StageWeights(
        first=first,
        embedding=embedding,
        layers=layers,
        final_norm=None if embedding is None else _tensor(weights, "model.norm.weight", (config.hidden_size,)),
        head=None if embedding is None else _head(weights, config, embedding),
    )


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in the weight's dtype, with the mean in fp32 for every dtype, as in training.

    Shapes:  hidden [rows, width], weight [width]. Returns [rows, width].
    """
    wide = hidden.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(weight.dtype)


def _head(weights: ModelWeights, config: LlamaConfig, embedding: Tensor) -> Tensor:
    """The head; a tied one is the embedding's tensor itself, so that it is moved and converted once."""
    table = (config.vocab_size, config.hidden_size)
    if not config.tied_embeddings:
        return _tensor(weights, HEAD, table)
    if isinstance(weights, AdaptedWeights) and not weights.changed.isdisjoint((HEAD, EMBEDDING)):
        # An adapter that was trained on one of the two changes only that one, as in PEFT.
        return _tensor(weights, HEAD, table) if HEAD in weights.changed else _tensor(weights.base, EMBEDDING, table)
    return embedding


def _layer(weights: ModelWeights, config: LlamaConfig, layer: int) -> LayerWeights:
    hidden, q_width, kv_width, ffn = (
        config.hidden_size,
        config.head_count * config.head_dim,
        config.kv_width,
        config.ffn_size,
    )

    def tensor(name: str, *shape: int) -> Tensor:
        return _tensor(weights, f"model.layers.{layer}.{name}.weight", shape)

    return LayerWeights(
        attention_norm=tensor("input_layernorm", hidden),
        q=tensor("self_attn.q_proj", q_width, hidden),
        k=tensor("self_attn.k_proj", kv_width, hidden),
        v=tensor("self_attn.v_proj", kv_width, hidden),
        o=tensor("self_attn.o_proj", hidden, q_width),
        ffn_norm=tensor("post_attention_layernorm", hidden),
        gate=tensor("mlp.gate_proj", ffn, hidden),
        up=tensor("mlp.up_proj", ffn, hidden),
        down=tensor("mlp.down_proj", hidden, ffn),
    )


def _tensor(weights: ModelWeights, name: str, shape: tuple[int, ...]) -> Tensor:
    try:
        tensor = weights[name]
    except KeyError as error:
        raise CheckpointInvalid(f"the checkpoint has no tensor {name}") from error
    if tuple(tensor.shape) != shape:
        raise CheckpointInvalid(f"tensor {name} has shape {list(tensor.shape)}, config.json requires {list(shape)}")
    if not tensor.is_floating_point() or tensor.element_size() not in (2, 4):
        raise CheckpointInvalid(f"tensor {name} is {tensor.dtype}: store fp16, bf16 or fp32")
    return tensor
