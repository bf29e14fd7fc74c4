"""Model families that the engine runs: how the config.json of each is read, and how its layers differ from Llama's.

A family is a `model_type`. `defaults` are what the format takes for fields that a file leaves out; files leave out what
is equal to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Windows = Literal["none", "all layers", "layers of a list", "all but every sixth"]
"""Layers with a sliding window: none, all if `sliding_window` is set, those that `layer_types` names, and Gemma's
pattern where `layer_types` is not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One family's form of config.json and of layers."""

    name: str
    architecture: str
    defaults: dict[str, Any] = field(default_factory=dict)
    windows: Windows = "none"
    biases: frozenset[str] = frozenset()
    """Fields that say whether projections have biases; if another family's is set, the model is refused."""
    always_biased: bool = False
    """True if queries, keys and values have biases in each of its models."""
    query_key_norms: bool = False
    fused_projections: bool = False
    """True if queries, keys and values are one matrix, and gate and up another."""
    gemma: bool = False
    """True if norms are zero-centred and also follow attention and feed-forward, embeddings are scaled by the square
    root of their width, and layers with a window have rotary settings of their own."""
    multipliers: bool = False
    """True if embeddings, residuals, attention and logits have factors of their own."""


FAMILIES: dict[str, ModelFamily] = {
    "llama": ModelFamily(
        name="Llama", architecture="LlamaForCausalLM", biases=frozenset({"attention_bias", "mlp_bias"})
    ),
    "mistral": ModelFamily(
        name="Mistral",
        architecture="MistralForCausalLM",
        windows="all layers",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": ModelFamily(
        name="Qwen2",
        architecture="Qwen2ForCausalLM",
        windows="layers of a list",
        always_biased=True,
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    ),
    "qwen3": ModelFamily(
        name="Qwen3",
        architecture="Qwen3ForCausalLM",
        windows="layers of a list",
        biases=frozenset({"attention_bias"}),
        query_key_norms=True,
        defaults={
            "num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128,
        },
    ),
    "gemma3_text": ModelFamily(
        name="Gemma 3 text",
        architecture="Gemma3ForCausalLM",
        windows="all but every sixth",
        biases=frozenset({"attention_bias"}),
        query_key_norms=True,
        gemma=True,
        defaults={
            "num_key_value_heads": 4, "max_position_embeddings": 131072, "sliding_window": 4096, "head_dim": 256,
            "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1e6,
            "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256,
        },
    ),
    "phi3": ModelFamily(
        name="Phi-3",
        architecture="Phi3ForCausalLM",
        windows="all layers",
        fused_projections=True,
        defaults={
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096,
        },
    ),
    "granite": ModelFamily(
        name="Granite",
        architecture="GraniteForCausalLM",
        biases=frozenset({"attention_bias", "mlp_bias"}),
        multipliers=True,
    ),
}  # fmt: skip
