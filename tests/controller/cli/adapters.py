"""LoRA adapters as PEFT writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.controller.cli.checkpoints import Tensor, encode, tensor

PREFIX = "base_model.model."


def adapter(*, rank: int = 2, into: int = 4, out: int = 6, module: str = "model.layers.0.q_proj") -> dict[str, Tensor]:
    return {
        f"{PREFIX}{module}.lora_A.weight": tensor(rank, into, seed=1),
        f"{PREFIX}{module}.lora_B.weight": tensor(out, rank, seed=2),
    }


def config(**changes: Any) -> dict[str, Any]:
    """As peft 0.17 writes it, with what changes."""
    values: dict[str, Any] = {
        "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "base", "bias": "none",
        "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
        "loftq_config": {}, "lora_alpha": 16, "lora_bias": False, "lora_dropout": 0.1, "megatron_config": None,
        "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "r": 2, "rank_pattern": {},
        "revision": None, "target_modules": ["q_proj", "q"], "task_type": "CAUSAL_LM", "use_dora": False,
        "use_rslora": False,
    }  # fmt: skip
    return {**values, **changes}


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config(**changes), indent=2))
    (folder / "adapter_model.safetensors").write_bytes(encode(tensors))
    return folder
