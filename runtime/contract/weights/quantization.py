"""Quantised weights: what config.json says of them, and which engine computes with them.

The native engine takes matrices in int8 with a factor for each row, as compressed-tensors stores them ("int-quantized",
by channel): so does `fs weights quantize`. vLLM has methods of its own, and the engine over transformers none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointInvalid

COMPRESSED_TENSORS = "compressed-tensors"
SCALE_SUFFIX = "_scale"
"""End of the name of a matrix's factors, behind the matrix's own."""
OF_VLLM = ("auto-round", "awq", COMPRESSED_TENSORS, "fbgemm_fp8", "fp8", "gptq", "modelopt", "mxfp4", "quark")
"""Methods of vLLM whose weights are tensors of the checkpoint. Others load files by themselves, or quantise."""
INT8_CONFIG: dict[str, Any] = {
    "quant_method": COMPRESSED_TENSORS,
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
            },
        }
    },
    "ignore": ["lm_head"],
}  # fmt: skip
"""The `quantization_config` of a checkpoint that `fs weights quantize` writes."""
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def quantization_of(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The settings of quantised weights in config.json; None if these are not quantised. Errors: CheckpointInvalid."""
    found = fields.get("quantization_config") or fields.get("compression_config")
    if found is not None and not isinstance(found, dict):
        raise CheckpointInvalid(f"config.json: quantization_config must be an object, is {found!r}")
    return found


def has_int8_matrices(fields: Mapping[str, Any]) -> bool:
    """Checks whether the native engine reads matrices in int8; False if the weights are not quantised.

    It multiplies by the whole numbers in fp32 and rounds no activations, whatever the settings say of these.

    Errors: CheckpointInvalid for weights that are quantised otherwise, with what differs.
    """
    found = quantization_of(fields)
    if found is None:
        return False
    if found.get("quant_method") != COMPRESSED_TENSORS:
        raise _refused(found, f"quant_method is {found.get('quant_method')!r}")
    groups = found.get("config_groups")
    if found.get("format") != INT8_CONFIG["format"] or not isinstance(groups, dict) or not groups:
        raise _refused(found, f"format is {found.get('format')!r}")
    if found.get("kv_cache_scheme"):
        raise _refused(found, "keys and values are quantised, too")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise _refused(found, f"{name} has no weights")
        for key, wanted in _WEIGHTS.items():
            if weights.get(key) != wanted:
                raise _refused(found, f"{key} of {name} is {weights.get(key)!r}")
    return True


def quant_method(fields: Mapping[str, Any]) -> str:
    """The method by which weights are quantised; empty if they are not. Errors: CheckpointInvalid."""
    found = quantization_of(fields)
    return "" if found is None else str(found.get("quant_method"))


def require_vllm_method(method: str) -> None:
    """Refuses weights that are quantised by a method whose tensors vLLM does not take. Errors: CheckpointInvalid."""
    if method and method not in OF_VLLM:
        raise CheckpointInvalid(
            f"config.json: vLLM gets no weights of quant_method {method!r} from here",
            hint=f"quantise them by one of {', '.join(OF_VLLM)}, or store fp16, bf16 or fp32",
        )


def refuse_quantized(method: str) -> None:
    """Refuses quantised weights for the engine over transformers. Errors: CheckpointInvalid."""
    if method:
        raise CheckpointInvalid("config.json: transformers runs no quantised weights here", hint=_hint(method))


def _refused(found: Mapping[str, Any], differs: str) -> CheckpointInvalid:
    return CheckpointInvalid(
        "config.json: of quantised weights the native engine runs those of compressed-tensors that are symmetric, in "
        f"int8 and by channel; here {differs}",
        hint=_hint(str(found.get("quant_method"))),
    )


def _hint(method: str) -> str:
    return f'engine="vllm" may run weights of {method}' if method in OF_VLLM else "store fp16, bf16 or fp32"
