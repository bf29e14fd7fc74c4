"""Named LoRA adapters for vLLM: folders in PEFT's format, which it reads, and the requests that name them.

vLLM applies an adapter's factors to activations, so sequences of several adapters are computed together over one copy
of the base. It reads an adapter from files: these are written from the segment, once, into the worker's temporary
memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...contract.weights import lora
from ...weights.tensor_mapping import TensorMapping

TENSORS = "adapter_model.safetensors"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM takes."""


def write_adapters(folder: Path, adapters: Mapping[str, TensorMapping]) -> dict[str, Path]:
    """Writes a folder for each adapter; waits for their weights. Returns the folders by the adapters' names."""
    from safetensors.torch import save_file

    found = {}
    for number, (name, adapter) in enumerate(sorted(adapters.items())):
        own = folder / f"adapter-{number}"
        own.mkdir()
        (own / lora.CONFIG).write_bytes(adapter.file(lora.CONFIG))
        save_file({tensor: adapter[tensor].contiguous() for tensor in adapter}, own / TENSORS)
        found[name] = own
    return found


def max_rank(adapters: Mapping[str, TensorMapping]) -> int:
    """The smallest rank of vLLM's that holds all adapters; the largest one, which vLLM then refuses, if none does."""
    largest = max(
        adapter.entry(tensor).shape[0] for adapter in adapters.values() for tensor in adapter if tensor.endswith(lora.A)
    )
    return next((rank for rank in RANKS if rank >= largest), RANKS[-1])


def arguments(adapters: Mapping[str, TensorMapping]) -> dict[str, Any]:
    """Arguments of vLLM's engine for these adapters; none without any."""
    if not adapters:
        return {}
    from vllm.platforms import current_platform

    # On processors vLLM 0.32 reads slot -1, the last one, for a sequence without an adapter beside one with: that slot
    # must hold none, or the base's tokens are those of another adapter. Free slots are zero, and the first ones fill.
    free = 1 if current_platform.is_cpu() else 0
    return {
        "enable_lora": True,
        "max_loras": len(adapters) + free,
        "max_cpu_loras": len(adapters) + free,
        "max_lora_rank": max_rank(adapters),
    }


def requests_of(folders: Mapping[str, Path]) -> dict[str, Any]:
    """vLLM's request of each adapter, by its name."""
    from vllm.lora.request import LoRARequest

    return {
        name: LoRARequest(name, number, str(folder)) for number, (name, folder) in enumerate(folders.items(), start=1)
    }
