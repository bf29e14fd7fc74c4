"""Model configuration: reads config.json of a Llama-family checkpoint, and rejects unsupported fields by name.

A wrong result is worse than an error: every field that changes the arithmetic is either honoured or rejected here.
Fields that do not (dropout, initialisers) are ignored. `fs deploy` reads it as well, so that
nothing is uploaded that no worker could run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ..decoding import UNDECODABLE
from ..errors import CheckpointInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's scaling of rotary frequencies to longer contexts."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    vocab_size: int
    hidden_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    ffn_size: int
    max_positions: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    tied_embeddings: bool
    eos_ids: frozenset[int]

    @property
    def kv_width(self) -> int:
        """Numbers of one token's key in one layer, and of its value."""
        return self.kv_head_count * self.head_dim


def read_config(config: bytes, generation: bytes | None = None) -> LlamaConfig:
    """Reads a configuration. Errors: CheckpointInvalid, naming the field."""
    fields = _json_object(config, "config.json")
    kind = fields.get("model_type", "llama")
    if kind != "llama":
        raise CheckpointInvalid(
            f"config.json: model_type {kind!r} is not supported",
            hint="the engine runs checkpoints of model_type 'llama'; serve others with a handler of your own",
        )
    _refuse_unsupported(fields)
    head_count = _positive(fields, "num_attention_heads")
    hidden_size = _positive(fields, "hidden_size")
    kv_head_count = _positive(fields, "num_key_value_heads", head_count)
    head_dim = _positive(fields, "head_dim", hidden_size // head_count)
    if head_count % kv_head_count:
        raise CheckpointInvalid(f"config.json: {head_count} heads do not divide among {kv_head_count} key-value heads")
    if head_dim % 2:
        raise CheckpointInvalid(f"config.json: head_dim {head_dim} must be even")
    # Newer files keep the rotary settings in one object, older ones beside the rest.
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    return LlamaConfig(
        vocab_size=_positive(fields, "vocab_size"),
        hidden_size=hidden_size,
        layer_count=_positive(fields, "num_hidden_layers"),
        head_count=head_count,
        kv_head_count=kv_head_count,
        head_dim=head_dim,
        ffn_size=_positive(fields, "intermediate_size"),
        max_positions=_positive(fields, "max_position_embeddings", 2048),
        rope_theta=float(rope.get("rope_theta") or fields.get("rope_theta") or 10_000.0),
        rope_scaling=_rope_scaling(rope),
        norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        eos_ids=_eos_ids(fields, _json_object(generation, "generation_config.json") if generation else {}),
    )


def _json_object(data: bytes, name: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except UNDECODABLE as error:
        raise CheckpointInvalid(f"{name} is not a JSON object: {error}") from error


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointInvalid(f"config.json: hidden_act {fields['hidden_act']!r} is not supported, only silu")
    for name in ("attention_bias", "mlp_bias"):
        if fields.get(name):
            raise CheckpointInvalid(f"config.json: {name} is not supported")
    for architecture in fields.get("architectures") or ():
        if architecture != "LlamaForCausalLM":
            raise CheckpointInvalid(
                f"config.json: architectures names {architecture!r}, only LlamaForCausalLM is supported",
                hint="the engine continues text; serve classifiers and other heads with a handler of your own",
            )
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointInvalid("config.json: partial_rotary_factor is not supported")
    if fields.get("sliding_window"):
        raise CheckpointInvalid("config.json: sliding_window is not supported")
    if fields.get("quantization_config"):
        raise CheckpointInvalid("config.json: quantised weights are not supported", hint="store fp16, bf16 or fp32")


def _positive(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None and default is not None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointInvalid(f"config.json: {name} must be a positive whole number, is {value!r}")
    return value


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise CheckpointInvalid(f"config.json: rope scaling {kind!r} is not supported, only llama3")
    try:
        return RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_positions=int(rope["original_max_position_embeddings"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointInvalid(f"config.json: rope scaling lacks or garbles {error}") from error


def _eos_ids(fields: dict[str, Any], generation: dict[str, Any]) -> frozenset[int]:
    """End tokens; generation_config.json has precedence, where instruct models add their end-of-turn token."""
    value = generation.get("eos_token_id", fields.get("eos_token_id"))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise CheckpointInvalid(f"eos_token_id must be a number or a list of them, is {value!r}")
    return frozenset(ids)
