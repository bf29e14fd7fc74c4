"""Memory for keys and values where a function leaves it open: on a GPU what its weights leave of the worker's share."""

from __future__ import annotations

from math import prod

import msgspec
import torch

from ...contract.errors import DeviceOutOfMemory
from ...contract.function.spec import LLMSettings
from ...contract.sizes import MIB
from ...contract.weights.decoder_config import stored_dtype
from ...contract.weights.manifest import DTYPE_BYTES, TensorEntry
from ...weights.tensor_mapping import TensorMapping
from ..model.weights import ModelWeights, optional_file

RESERVED_PART = 0.1
RESERVED_LEAST_BYTES = 512 * MIB
"""Of a share, what is left for activations, workspaces of libraries and graphs: the larger of both."""
STORED = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""Name of each dtype of the arithmetic in the format of checkpoints."""


def kv_budget(*, share_bytes: int, used_bytes: int, free_bytes: int, weights_bytes: int) -> int:
    """Bytes for keys and values. `share_bytes`: what the process may allocate; `used_bytes`: what of it it has
    allocated; `free_bytes`: what the device has free; `weights_bytes`: what is still to be loaded."""
    left = min(share_bytes - used_bytes, free_bytes) - weights_bytes
    return max(0, left - max(RESERVED_LEAST_BYTES, round(share_bytes * RESERVED_PART)))


def with_kv_memory(settings: LLMSettings, weights: ModelWeights, *, engines: int) -> LLMSettings:
    """Settings whose KV memory is a number of bytes. `engines`: those that hold the weights; with `first`, two of them
    have that much for keys and values each.

    Errors: DeviceOutOfMemory if the weights leave none.
    """
    if settings.kv_memory_bytes:
        return settings
    # Before torch 2.8 a process cannot ask for its share.
    if not torch.cuda.is_available() or not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        return msgspec.structs.replace(settings, kv_memory_bytes=settings.least_kv_bytes)
    free_bytes, whole_bytes = torch.cuda.mem_get_info()
    share_bytes = round(whole_bytes * torch.cuda.get_per_process_memory_fraction())
    weights_bytes = engines * _weights_bytes(weights, settings)
    budget = kv_budget(
        share_bytes=share_bytes,
        used_bytes=torch.cuda.memory_reserved(),
        free_bytes=free_bytes,
        weights_bytes=weights_bytes,
    )
    if settings.first:
        budget //= 2
    if budget < MIB:
        raise DeviceOutOfMemory(
            f"weights of {weights_bytes / MIB:.0f} MiB leave no memory for keys and values in a share of "
            f"{share_bytes / MIB:.0f} MiB",
            hint="further workers get more; ask for more with `gpu` to spare them the failed start",
        )
    return msgspec.structs.replace(settings, kv_memory_bytes=budget)


def _weights_bytes(weights: ModelWeights, settings: LLMSettings) -> int:
    """Device memory of one engine's weights, without waiting for them: as they are stored, and beside them what is
    converted to another dtype."""
    if not isinstance(weights, TensorMapping):
        return 0
    dtype: str = settings.dtype
    if dtype == "auto":
        dtype = stored_dtype(msgspec.json.decode(optional_file(weights, "config.json") or b"{}"))
    return sum(_size_bytes(weights.entry(name), STORED[dtype]) for name in weights)


def _size_bytes(entry: TensorEntry, wanted: str) -> int:
    converted = entry.dtype in STORED.values() and entry.dtype != wanted
    return entry.size_bytes + (prod(entry.shape) * DTYPE_BYTES[wanted] if converted else 0)
