"""Model configuration: reads the config.json of a family that the engine runs, and rejects unsupported fields by name.

A wrong result is worse than an error: every field that changes the arithmetic is either honoured or rejected here.
Fields that do not (dropout, initialisers) are ignored. `fs deploy` reads it as well, so that
nothing is uploaded that no worker could run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ..decoding import UNDECODABLE
from ..errors import CheckpointInvalid
from .model_families import FAMILIES, ModelFamily
from .quantization import has_int8_matrices
from .rope_config import Rope, read_rope

Activation = Literal["silu", "gelu_tanh"]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip
LANES = 16
"""Numbers in the CPU kernels' widest vector: rows of every matrix must be a multiple."""
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shapes and arithmetic of one model's decoder layers, whatever its family."""

    family: str
    """Its `model_type`."""
    vocab_size: int
    hidden_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    ffn_size: int
    max_positions: int
    context_tokens: int
    """Tokens of the longest sequence that is computed; `max_positions` until a deployment says less."""
    norm_eps: float
    tied_embeddings: bool
    eos_ids: frozenset[int]
    stored_dtype: str
    """The weights' dtype by config.json: "fp32", "bf16" or "fp16"; fp32 if it is silent. Of those in int8 it is that of
    the others, and of keys and values."""
    int8_matrices: bool
    """True if the layers' matrices may be stored in int8, with a factor for each row (`quantization`)."""
    activation: Activation
    rope: Rope
    local_rope: Rope | None
    """Of layers with a sliding window, where it is another one."""
    windows: tuple[int | None, ...]
    """For each layer, how many tokens a token sees, itself included; None: all before it."""
    qkv_bias: bool
    output_bias: bool
    ffn_bias: bool
    query_key_norms: bool
    output_norms: bool
    """True if norms follow attention and feed-forward, before their results are added."""
    zero_centred_norms: bool
    """True if norms multiply by one more than their weight."""
    fused_projections: bool
    attention_scale: float
    """Factor of queries' products with keys."""
    attention_softcap: float | None
    logits_softcap: float | None
    embedding_scale: float
    residual_scale: float
    logits_scale: float

    @property
    def kv_width(self) -> int:
        """Numbers of one token's key in one layer, and of its value."""
        return self.kv_head_count * self.head_dim

    @property
    def not_native(self) -> str:
        """The reason why the CPU kernels cannot compute the model, which then runs on torch; empty if they can."""
        widths = {"hidden_size": self.hidden_size, "intermediate_size": self.ffn_size, "head_dim": self.head_dim}
        wrong = [f"{name} {width} is no multiple of {LANES}" for name, width in widths.items() if width % LANES]
        return wrong[0] if wrong else ""

    def not_split(self, ranks: int) -> str:
        """The reason why the model cannot be split evenly among so many ranks (tensor parallelism); empty if it can."""
        sizes = {
            "num_attention_heads": self.head_count,
            "num_key_value_heads": self.kv_head_count,
            "intermediate_size": self.ffn_size,
        }
        wrong = [f"{name} {size} is no multiple of {ranks}" for name, size in sizes.items() if size % ranks]
        return wrong[0] if wrong else ""

    def rope_of(self, layer: int) -> Rope:
        return self.rope if self.local_rope is None or self.windows[layer] is None else self.local_rope


def stored_dtype(fields: Mapping[str, Any]) -> str:
    """The weights' dtype by the fields of config.json: "fp32", "bf16" or "fp16"; fp32 if they are silent."""
    return _DTYPES.get(str(fields.get("dtype") or fields.get("torch_dtype")), "fp32")


def read_config(config: bytes, generation: bytes | None = None) -> DecoderConfig:
    """Reads a configuration. Errors: CheckpointInvalid, naming the field."""
    given = _json_object(config, "config.json")
    family = _family(given)
    fields = family.defaults | given
    _refuse_unsupported(fields, family)
    head_count = _positive(fields, "num_attention_heads")
    hidden_size = _positive(fields, "hidden_size")
    layer_count = _positive(fields, "num_hidden_layers")
    kv_head_count = _positive(fields, "num_key_value_heads", head_count)
    head_dim = _positive(fields, "head_dim", hidden_size // head_count)
    if head_count % kv_head_count:
        raise CheckpointInvalid(f"config.json: {head_count} heads do not divide among {kv_head_count} key-value heads")
    if head_dim % 2:
        raise CheckpointInvalid(f"config.json: head_dim {head_dim} must be even")
    positions = _positive(fields, "max_position_embeddings", 2048)
    rope, local_rope = _ropes(fields, family, head_dim, positions)
    reach = rope.reach(positions)
    attention_bias = bool(fields.get("attention_bias", False))
    return DecoderConfig(
        family=fields.get("model_type", "llama"),
        vocab_size=_positive(fields, "vocab_size"),
        hidden_size=hidden_size,
        layer_count=layer_count,
        head_count=head_count,
        kv_head_count=kv_head_count,
        head_dim=head_dim,
        ffn_size=_positive(fields, "intermediate_size"),
        max_positions=reach,
        context_tokens=reach,
        norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        eos_ids=_eos_ids(fields, _json_object(generation, "generation_config.json") if generation else {}),
        stored_dtype=stored_dtype(fields),
        int8_matrices=has_int8_matrices(fields),
        activation=_ACTIVATIONS[_activation_field(fields, family)],
        rope=rope,
        local_rope=local_rope,
        windows=_windows(fields, family, layer_count),
        qkv_bias=family.always_biased or attention_bias,
        output_bias=attention_bias,
        ffn_bias=bool(fields.get("mlp_bias", False)),
        query_key_norms=family.query_key_norms,
        output_norms=family.gemma,
        zero_centred_norms=family.gemma,
        fused_projections=family.fused_projections,
        attention_scale=_attention_scale(fields, family, head_dim),
        attention_softcap=_softcap(fields, family, "attn_logit_softcapping"),
        logits_softcap=_softcap(fields, family, "final_logit_softcapping"),
        embedding_scale=hidden_size**0.5 if family.gemma else _multiplier(fields, family, "embedding_multiplier"),
        residual_scale=_multiplier(fields, family, "residual_multiplier"),
        logits_scale=1.0 / _multiplier(fields, family, "logits_scaling"),
    )


def _json_object(data: bytes, name: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except UNDECODABLE as error:
        raise CheckpointInvalid(f"{name} is not a JSON object: {error}") from error


def _family(fields: dict[str, Any]) -> ModelFamily:
    kind = fields.get("model_type", "llama")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise CheckpointInvalid(
            f"config.json: model_type {kind!r} is not supported",
            hint=f"the engine runs checkpoints of model_type {', '.join(FAMILIES)}; "
            "serve others with a handler of your own",
        )
    return family


def _activation_field(fields: dict[str, Any], family: ModelFamily) -> str:
    name = "hidden_activation" if family.gemma else "hidden_act"
    value = fields.get(name, "silu")
    if value not in _ACTIVATIONS:
        raise CheckpointInvalid(f"config.json: {name} {value!r} is not supported, only {', '.join(_ACTIVATIONS)}")
    return str(value)


def _refuse_unsupported(fields: dict[str, Any], family: ModelFamily) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if fields.get(name) and name not in family.biases:
            raise CheckpointInvalid(f"config.json: {name} is not supported for {family.name}")
    for architecture in fields.get("architectures") or ():
        if architecture != family.architecture:
            raise CheckpointInvalid(
                f"config.json: architectures names {architecture!r}, only {family.architecture} is supported",
                hint="the engine continues text; serve classifiers and other heads with a handler of your own",
            )
    if fields.get("partial_rotary_factor", 1.0) != 1.0 and not family.fused_projections:
        raise CheckpointInvalid(f"config.json: partial_rotary_factor is not supported for {family.name}")
    if fields.get("use_bidirectional_attention"):
        raise CheckpointInvalid("config.json: use_bidirectional_attention is not supported: a token sees earlier ones")
    if family.windows == "none" and fields.get("sliding_window"):
        raise CheckpointInvalid(f"config.json: sliding_window is not supported for {family.name}")


def _positive(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None and default is not None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointInvalid(f"config.json: {name} must be a positive whole number, is {value!r}")
    return value


def _multiplier(fields: dict[str, Any], family: ModelFamily, name: str, default: float = 1.0) -> float:
    if not family.multipliers:
        return 1.0
    value = fields.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise CheckpointInvalid(f"config.json: {name} must be a positive number, is {value!r}")
    return float(value)


def _softcap(fields: dict[str, Any], family: ModelFamily, name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if not family.gemma or not isinstance(value, int | float) or value <= 0:
        raise CheckpointInvalid(f"config.json: {name} {value!r} is not supported for {family.name}")
    return float(value)


def _attention_scale(fields: dict[str, Any], family: ModelFamily, head_dim: int) -> float:
    if family.multipliers:
        return _multiplier(fields, family, "attention_multiplier")
    return 1.0 / math.sqrt(_positive(fields, "query_pre_attn_scalar") if family.gemma else head_dim)


def _ropes(fields: dict[str, Any], family: ModelFamily, head_dim: int, max_positions: int) -> tuple[Rope, Rope | None]:
    """Rotary settings, and those of layers with a window. Newer files keep them in one object, older ones beside the
    rest."""
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    local: dict[str, Any] = {}
    if family.gemma and ("full_attention" in scaling or "sliding_attention" in scaling):
        scaling, local = scaling.get("full_attention") or {}, scaling.get("sliding_attention") or {}
    if not isinstance(scaling, dict) or not isinstance(local, dict):
        raise CheckpointInvalid(f"config.json: rotary settings must be an object, are {scaling!r}")
    original = fields.get("original_max_position_embeddings")
    beside = {"partial_rotary_factor": fields.get("partial_rotary_factor", 1.0)}
    if family.fused_projections and scaling.get("type", scaling.get("rope_type")) == "yarn":
        beside |= {"type": "longrope"}  # the name that Phi-3's first files have for it
        scaling = {name: value for name, value in scaling.items() if name not in ("type", "rope_type")}

    def one(settings: dict[str, Any], theta_field: str) -> Rope:
        return read_rope(
            beside | settings,
            theta=float(fields.get(theta_field) or 10_000.0),
            head_dim=head_dim,
            max_positions=max_positions,
            original=None if original is None else _positive(fields, "original_max_position_embeddings"),
        )

    return one(scaling, "rope_theta"), one(local, "rope_local_base_freq") if family.gemma else None


def _windows(fields: dict[str, Any], family: ModelFamily, layer_count: int) -> tuple[int | None, ...]:
    """The sliding window of each layer."""
    window = None if fields.get("sliding_window") is None else _positive(fields, "sliding_window")
    if family.windows == "layers of a list" and not fields.get("use_sliding_window", False):
        window = None
    if family.windows == "none" or window is None:
        return (None,) * layer_count
    if family.windows == "all layers":
        return (window,) * layer_count
    kinds = fields.get("layer_types")
    if kinds is None and family.gemma:
        every = _positive(fields, "sliding_window_pattern", 6)
        return tuple(window if (layer + 1) % every else None for layer in range(layer_count))
    if kinds is None:
        first = fields.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(layer_count))
    if not isinstance(kinds, list) or len(kinds) != layer_count:
        raise CheckpointInvalid(f"config.json: layer_types must name {layer_count} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise CheckpointInvalid(f"config.json: layer_types: {kind!r} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos_ids(fields: dict[str, Any], generation: dict[str, Any]) -> frozenset[int]:
    """End tokens; generation_config.json has precedence, where instruct models add their end-of-turn token."""
    value = generation.get("eos_token_id", fields.get("eos_token_id"))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise CheckpointInvalid(f"eos_token_id must be a number or a list of them, is {value!r}")
    return frozenset(ids)
