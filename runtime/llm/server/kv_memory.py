"""Memory for keys and values where a function leaves it open: on a GPU what its weights leave of the worker's share."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import torch

from ...contract.errors import DeviceOutOfMemory
from ...contract.function.spec import DEFAULT_KV_BYTES, LLMSettings
from ...contract.sizes import MIB
from ...weights.tensor_mapping import IndexedTensors, TensorMapping
from ..model.weights import ModelWeights

RESERVED_PART = 0.1
RESERVED_LEAST_BYTES = 512 * MIB
"""Of a share, what is left for activations, workspaces of libraries and graphs: the larger of both."""
COPIES = {"auto": 1, "fp32": 3, "bf16": 2, "fp16": 2}
"""How often a GPU holds 16-bit weights in size: as they are stored, and beside them what they are converted to."""


def kv_budget(*, share_bytes: int, used_bytes: int, free_bytes: int, weights_bytes: int) -> int:
    """Bytes for keys and values. `share_bytes`: what the process may allocate; `used_bytes`: what of it it has
    allocated; `free_bytes`: what the device has free; `weights_bytes`: what is still to be loaded."""
    left = min(share_bytes - used_bytes, free_bytes) - weights_bytes
    return max(0, left - max(RESERVED_LEAST_BYTES, round(share_bytes * RESERVED_PART)))


def with_kv_memory(settings: LLMSettings, weights: ModelWeights) -> LLMSettings:
    """Settings whose KV memory is a number of bytes. Errors: DeviceOutOfMemory if the weights leave none."""
    if settings.kv_memory_bytes:
        return settings
    if not torch.cuda.is_available():
        return msgspec.structs.replace(settings, kv_memory_bytes=DEFAULT_KV_BYTES)
    free_bytes, whole_bytes = torch.cuda.mem_get_info()
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)()  # torch 2.8
    share_bytes = round(whole_bytes * fraction)
    weights_bytes = _stored_bytes(weights) * COPIES[settings.dtype]
    budget = kv_budget(
        share_bytes=share_bytes,
        used_bytes=torch.cuda.memory_reserved(),
        free_bytes=free_bytes,
        weights_bytes=weights_bytes,
    )
    if settings.first:
        budget //= 2  # each of the two engines has its own
    if budget < MIB:
        raise DeviceOutOfMemory(
            f"weights of {weights_bytes / MIB:.0f} MiB leave no memory for keys and values in a share of "
            f"{share_bytes / MIB:.0f} MiB",
            hint="further workers get more; ask for more with `gpu` to spare them the failed start",
        )
    return msgspec.structs.replace(settings, kv_memory_bytes=budget)


def _stored_bytes(weights: ModelWeights) -> int:
    """Size of the tensors, without waiting for one where the checkpoint has a table of them."""
    if isinstance(weights, IndexedTensors):
        return sum(weights.entry(name).size_bytes for name in weights)
    names: Iterable[str] = weights if isinstance(weights, TensorMapping) else ()
    return sum(weights[name].nbytes for name in names)
