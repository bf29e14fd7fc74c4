"""Small random models of every family that the engine runs, made by transformers, with its configuration files."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from tests.runtime.llm.models import Checkpoint, byte_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_FACTOR = {"rope_theta": 10000.0, "factor": 2.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0 + place / 8 for place in range(8)], "long_factor": [2.0 + place for place in range(8)],
}  # fmt: skip
_GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 32, "sliding_window": 8}

CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, linear": {"model_type": "llama", "rope_parameters": {"rope_type": "linear", **_FACTOR}},
    "llama, dynamic": {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", **_FACTOR}},
    "llama, yarn": {"model_type": "llama", "rope_parameters": _YARN},
    "llama, llama3": {"model_type": "llama", "rope_parameters": _LLAMA3},
    "mistral": {"model_type": "mistral", "sliding_window": 8, "head_dim": 32},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, windows": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "gemma3": {"model_type": "gemma3_text", **_GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3, softcaps": {
        "model_type": "gemma3_text", **_GEMMA, "layer_types": ["full_attention", "sliding_attention"],
        "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0,
    },
    "gemma3, pattern": {"model_type": "gemma3_text", **_GEMMA, "num_hidden_layers": 6},
    "phi3": {"model_type": "phi3", "sliding_window": 30},
    "phi3, longrope": {"model_type": "phi3", "rope_parameters": _LONGROPE, "original_max_position_embeddings": 32},
    "phi3, partial": {"model_type": "phi3", "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    "granite": {
        "model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0,
        "attention_multiplier": 0.1, "attention_bias": True,
    },
}  # fmt: skip


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "granite")
"""The case of each family that has nothing special."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyModel:
    """One model, as transformers runs it and as a checkpoint."""

    theirs: Any
    weights: Checkpoint


_WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
"""For vLLM, whose kernels know heads of 32 and more."""


@functools.cache
def family_model(case: str, seed: int = 0, *, wide: bool = False) -> FamilyModel:
    """Noise as weights, the same for one seed; biases and norms, too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = SHAPE | CASES[case] | (_WIDE if wide else {})
    config = AutoConfig.for_model(**fields)
    config._attn_implementation = "eager"  # the one that has softcaps
    theirs: Any = AutoModelForCausalLM.from_config(config).eval()
    config.architectures = [type(theirs).__name__]  # as a saved model has it
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(theirs.named_parameters()):
            values = torch.randn(parameter.shape, generator=noise) * 0.3
            centre = 1.0 if "norm" in name and fields["model_type"] != "gemma3_text" else 0.0
            parameter.copy_(values + centre)
    files = {
        "config.json": config.to_json_string().encode(),
        "generation_config.json": b'{"eos_token_id": 257, "do_sample": false}',
        "tokenizer.json": byte_tokenizer(),
        "tokenizer_config.json": b"{}",
    }
    tensors = {name: parameter.detach() for name, parameter in theirs.named_parameters()}
    return FamilyModel(theirs=theirs, weights=Checkpoint(tensors, files))


def greedy(theirs: Any, sequence: list[int], count: int) -> list[int]:
    """The tokens that transformers finds most likely at the last `count` places, each after those before it."""
    with torch.inference_mode():
        logits = theirs(torch.tensor([sequence[:-1]]), use_cache=False).logits[0]
    tokens: list[int] = logits[-count:].argmax(-1).tolist()
    return tokens


def shortfall(theirs: Any, sequence: list[int], count: int) -> float:
    """The largest distance of the last `count` tokens' logits below the largest ones, in spreads of the logits."""
    with torch.inference_mode():
        logits = theirs(torch.tensor([sequence[:-1]]), use_cache=False).logits[0, -count:]
    chosen = logits.gather(1, torch.tensor(sequence[-count:])[:, None])[:, 0]
    return float(((logits.amax(-1) - chosen) / logits.std(-1)).max())
