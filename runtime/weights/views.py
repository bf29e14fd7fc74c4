"""Tensors over a region's memory where they lie, of every dtype that safetensors knows."""

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
"""DLPack has no 8-bit float that every torch release reads: they cross as bytes and are viewed."""


def view(region: Region, dtype: str, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """No copy; it keeps the region's mapping alive. `dtype` by its safetensors name. IndexError if outside."""
    if 0 in shape:
        import torch

        return torch.empty(shape, dtype=torch_dtype(dtype))
    if dtype in _VIEWED:
        return _from_dlpack()(region.dlpack(offset, shape, "U8")).view(torch_dtype(dtype))
    return _from_dlpack()(region.dlpack(offset, shape, dtype))


@functools.cache
def _from_dlpack() -> Callable[[object], torch.Tensor]:
    """Looked up once: two hundred statements of import take a tenth of the time of two hundred tensors."""
    from torch.utils.dlpack import from_dlpack

    return from_dlpack


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    return prod(shape) * DTYPE_BYTES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    import torch

    names = {
        "BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
        "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
        "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
        "C64": "complex64",
    }  # fmt: skip
    found: torch.dtype = getattr(torch, _VIEWED.get(name) or names[name])
    return found
