"""Weights as numpy arrays: read-only views of the shared memory, for handlers that do not use torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy

from ..contract.weights.manifest import TensorEntry

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip
"""numpy's dtypes by safetensors' names. numpy has none for BF16 and the 8-bit floats."""
_FLOAT32_LOWER_BITS = 16
"""A bfloat16 is the upper half of a float32."""


class NumpyWeights(Mapping[str, "NDArray[Any]"]):
    """Arrays by name. An access waits until the tensor has arrived; nothing is copied unless `widen` is set.

    Errors: TypeError for a tensor whose dtype numpy lacks; the message says which and what to do.
    """

    def __init__(
        self,
        names: Mapping[str, object],
        entry: Callable[[str], TensorEntry],
        read: Callable[[str], memoryview],
        *,
        widen: bool,
    ) -> None:
        """`entry` and `read` give a tensor's shape and its bytes by name."""
        self._names = names
        self._entry = entry
        self._read = read
        self._widen = widen

    def __getitem__(self, name: str) -> NDArray[Any]:
        entry = self._entry(name)
        if entry.dtype == "BF16" and self._widen:
            halves = numpy.frombuffer(self._read(name), numpy.uint16).astype(numpy.uint32)
            return (halves << _FLOAT32_LOWER_BITS).view(numpy.float32).reshape(entry.shape)
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise TypeError(f"tensor {name!r} is {entry.dtype}, for which numpy has no type: {_advice(entry.dtype)}")
        return numpy.frombuffer(self._read(name), dtype).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __repr__(self) -> str:
        return f"NumpyWeights({len(self)} arrays)"


def _advice(dtype: str) -> str:
    if dtype == "BF16":
        return "weights.numpy(widen=True) gives such tensors as float32 copies with the same values"
    return "read it as a torch tensor, weights[name]"
