"""Config of any causal language model of transformers: the few fields that an engine needs beside the model itself.

`fs deploy` reads it as well, and refuses by name what `AutoModelForCausalLM` could not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ..decoding import UNDECODABLE
from ..errors import CheckpointInvalid
from .quantization import quant_method, refuse_quantized

_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")
"""Names of the longest context, in the families' own words."""
_STATEFUL = (
    "bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2", "minimax",
    "nemotron_h", "olmo_hybrid", "qwen3_next", "recurrent_gemma", "rwkv", "zamba", "zamba2",
)  # fmt: skip
"""Model types that keep a recurrent state beside keys and values, or in place of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalConfig:
    """`max_positions`: longest context in tokens; 0 if the config names none. `quant_method`: of quantised weights."""

    model_type: str
    max_positions: int
    eos_ids: frozenset[int]
    quant_method: str


def read_causal_config(config: bytes, generation: bytes | None = None) -> CausalConfig:
    """Reads a configuration. Errors: CheckpointInvalid for a model that does not continue text."""
    fields = _json_object(config, "config.json")
    kind = fields.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise CheckpointInvalid(
            "config.json names no model_type", hint="push the folder that save_pretrained wrote, not a file of it"
        )
    if fields.get("is_encoder_decoder"):
        raise CheckpointInvalid(f"config.json: {kind!r} has an encoder, and an LLM continues text")
    architectures = fields.get("architectures") or []
    if architectures and not any(_continues_text(str(one)) for one in architectures):
        raise CheckpointInvalid(
            f"config.json: {architectures[0]} does not continue text",
            hint="serve classifiers and embeddings with Transformers(task=...), others with a handler of your own",
        )
    if fields.get("auto_map") and "AutoModelForCausalLM" in fields["auto_map"]:
        raise CheckpointInvalid(
            f"config.json: {kind!r} is computed by code of the checkpoint, which is not run",
            hint="convert it to an architecture of transformers and leave out auto_map",
        )
    text = fields.get("text_config") or {}
    return CausalConfig(
        model_type=kind,
        max_positions=_positions(text) or _positions(fields),
        eos_ids=_eos_ids(fields, generation),
        quant_method=quant_method(fields),
    )


def require_transformers(config: CausalConfig) -> None:
    """Refuses a model that the engine over transformers cannot run: one with a recurrent state, or with quantised
    weights. Errors: CheckpointInvalid."""
    refuse_quantized(config.quant_method)
    if config.model_type in _STATEFUL:
        raise CheckpointInvalid(
            f"config.json: {config.model_type!r} keeps a recurrent state, and this engine only keys and values",
            hint='engine="vllm" may run it; or serve it with a handler of your own',
        )


def _continues_text(architecture: str) -> bool:
    """Checks whether it is named as transformers names models with a language head: "LMHeadModel" in old ones."""
    return any(part in architecture for part in ("ForCausalLM", "LMHead", "ForConditionalGeneration"))


def _positions(fields: dict[str, Any]) -> int:
    values = (fields.get(name) for name in _POSITIONS)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _eos_ids(fields: dict[str, Any], generation: bytes | None) -> frozenset[int]:
    """End tokens; generation_config.json has precedence."""
    given = _json_object(generation, "generation_config.json") if generation else {}
    text = fields.get("text_config") or {}
    value = given.get("eos_token_id", fields.get("eos_token_id", text.get("eos_token_id")))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise CheckpointInvalid(f"eos_token_id must be a number or a list of them, is {value!r}")
    return frozenset(ids)


def _json_object(data: bytes, name: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except UNDECODABLE as error:
        raise CheckpointInvalid(f"{name} is not a JSON object: {error}") from error
