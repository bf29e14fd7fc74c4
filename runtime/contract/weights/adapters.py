"""A function's LoRA adapter and the weights that it is to adapt: refused at deploy, before anything starts.

The rules are the contract's (`runtime.contract.lora`), and the worker's too.
"""

from __future__ import annotations

from ..errors import CheckpointInvalid, InvalidSpec
from ..ids import FunctionName
from .lora import CONFIG, Adapter, check_fits
from .manifest import Manifest


def is_adapter(manifest: Manifest) -> bool:
    return CONFIG in manifest.files


def require_fit(name: FunctionName, base: Manifest, adapter: Adapter) -> None:
    """Errors: InvalidSpec, naming the first tensor that does not fit."""
    if is_adapter(base):
        raise InvalidSpec(
            f"function {name}: its weights are a LoRA adapter, which is no model",
            hint='write weights="./base", adapter="./lora"',
        )
    weights = {**base.tensors, **{alias: base.tensors[tensor] for alias, tensor in base.aliases.items()}}
    try:
        check_fits(adapter, weights)
    except CheckpointInvalid as error:
        raise InvalidSpec(f"function {name}: {error.message}", hint=error.hint) from error
