"""Tensor views over a region's memory, of every dtype of safetensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

from fleetstart.native import Region

from ..contract.weights.manifest import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

_VIEWED = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""8-bit floats, which not every torch release reads by DLPack: they are passed as bytes and viewed."""


def view(region: Region, dtype: str, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over `shape` numbers at a byte offset, without a copy; it keeps the mapping alive.

    `dtype` by its safetensors name. Errors: IndexError if it lies outside the region.
    """
    if 0 in shape:
        import torch

        return torch.empty(shape, dtype=torch_dtype(dtype))
    if dtype in _VIEWED:
        return _from_dlpack()(region.dlpack(offset, shape, "U8")).view(torch_dtype(dtype))
    return _from_dlpack()(region.dlpack(offset, shape, dtype))


@functools.cache
def _from_dlpack() -> Callable[[object], torch.Tensor]:
    """torch's from_dlpack, cached: two hundred import statements take a tenth of the time of two hundred tensors."""
    from torch.utils.dlpack import from_dlpack

    return from_dlpack


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Size of a tensor in bytes."""
    return prod(shape) * DTYPE_BYTES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for a safetensors name."""
    import torch

    names = {
        "BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
        "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
        "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
        "C64": "complex64",
    }  # fmt: skip
    found: torch.dtype = getattr(torch, _VIEWED.get(name) or names[name])
    return found
