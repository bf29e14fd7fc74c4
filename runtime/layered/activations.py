"""Activations between layers: validation and wire format.

Activations are one numpy array or torch tensor, or a dict of them. Anything else is rejected everywhere, also on a
single worker: a model that works on one worker works on four.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import prod
from typing import Any

from ..contract.weights.manifest import ALIGNMENT_BYTES, DTYPE_BYTES
from ..pipeline.frames import PAYLOAD_MAX_BYTES, Activations, ArrayForm, Buffer

ARRAYS_MAX = 64
DIMENSIONS_MAX = 16
NAME_MAX = 256

_NUMPY = {
    "BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip
_TORCH = {
    **_NUMPY,
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_OF_NUMPY = {name: dtype for dtype, name in _NUMPY.items()}
_OF_TORCH = {f"torch.{name}": dtype for dtype, name in _TORCH.items()}


class InvalidActivations(TypeError):
    """Error of a layer's result that is not activations."""


def forms_of(activations: Any) -> tuple[list[ArrayForm], bool]:
    """Forms of the arrays, and whether it is a single array. Errors: InvalidActivations."""
    single = not isinstance(activations, Mapping)
    named: Mapping[Any, Any] = {"": activations} if single else activations
    if not 1 <= len(named) <= ARRAYS_MAX:
        raise InvalidActivations(f"a dict of {len(named)} arrays, 1 to {ARRAYS_MAX} are allowed")
    forms = [_form(name, array) for name, array in named.items()]
    if (size_bytes := _end(forms)) > PAYLOAD_MAX_BYTES:
        raise InvalidActivations(f"activations of {size_bytes} bytes, {PAYLOAD_MAX_BYTES} at most")
    return forms, single


def pack(number: int, activations: Any) -> tuple[Activations, Buffer]:
    """Encodes one call's activations as a frame. Errors: InvalidActivations."""
    forms, single = forms_of(activations)
    arrays = [activations] if single else list(activations.values())
    if single:
        return Activations(number, forms, single), _bytes(arrays[0])
    payload = bytearray(_end(forms))
    for offset, form, array in zip(_offsets(forms), forms, arrays, strict=True):
        payload[offset : offset + _size(form)] = _bytes(array)
    return Activations(number, forms, single), payload


def unpack(frame: Activations, payload: bytearray) -> Any:
    """Decodes activations, as views of the payload. Errors: ValueError if message and payload do not fit."""
    _check(frame, payload)
    arrays = {
        form.name: _array(form, payload, offset)
        for offset, form in zip(_offsets(frame.arrays), frame.arrays, strict=True)
    }
    return arrays[frame.arrays[0].name] if frame.single else arrays


def _form(name: object, array: Any) -> ArrayForm:
    if not isinstance(name, str) or len(name) > NAME_MAX:
        raise InvalidActivations(f"a dict's key {str(name)[:80]!r}, names of up to {NAME_MAX} characters are allowed")
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    where = f"{name!r}: " if name else ""
    if torch is not None and isinstance(array, torch.Tensor):
        dtype = _OF_TORCH.get(str(array.dtype)) if array.layout is torch.strided and not array.is_quantized else None
        library, what = "torch", f"a torch tensor of {array.dtype}, {array.layout}"
    elif numpy is not None and isinstance(array, numpy.ndarray | numpy.generic):
        dtype = _OF_NUMPY.get(array.dtype.name) if array.dtype.isnative else None
        library, what = "numpy", f"a numpy array of {array.dtype}"
    else:
        raise InvalidActivations(
            f"{where}{_kind(array)}, where a numpy array, a torch tensor or a dict of such is expected"
        )
    if dtype is None or array.ndim > DIMENSIONS_MAX:
        raise InvalidActivations(f"{where}{what} with {array.ndim} dimensions, which cannot be sent between stages")
    return ArrayForm(name, dtype, tuple(array.shape), "torch" if library == "torch" else "numpy")


def _kind(value: Any) -> str:
    return "nothing (None)" if value is None else f"a {type(value).__name__}"


def _bytes(array: Any) -> Buffer:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        flat = array.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        array = flat.view(torch.uint8).numpy() if flat.numel() else flat.new_empty(0, dtype=torch.uint8).numpy()
    import numpy

    contiguous: Any = numpy.ascontiguousarray(array)
    return memoryview(contiguous.reshape(-1).view(numpy.uint8))


def _array(form: ArrayForm, payload: bytearray, offset: int) -> Any:
    count = prod(form.shape)
    if form.library == "numpy":
        import numpy

        return numpy.frombuffer(payload, _NUMPY[form.dtype], count, offset).reshape(form.shape)
    import torch

    dtype = getattr(torch, _TORCH[form.dtype])
    if count == 0:
        return torch.empty(form.shape, dtype=dtype)
    return torch.frombuffer(payload, dtype=dtype, count=count, offset=offset).view(form.shape)


def _check(frame: Activations, payload: bytearray) -> None:
    forms = frame.arrays
    if not 1 <= len(forms) <= ARRAYS_MAX or (frame.single and len(forms) != 1):
        raise ValueError(f"a frame of {len(forms)} arrays")
    if len({form.name for form in forms}) != len(forms) or any(len(form.name) > NAME_MAX for form in forms):
        raise ValueError("names of arrays that stand twice or are too long")
    for form in forms:
        if form.dtype not in (_NUMPY if form.library == "numpy" else _TORCH):
            raise ValueError(f"array {form.name!r}: no dtype {form.dtype[:40]!r} of {form.library}")
        # Dimensions too: a zero beside a huge one has no bytes, and is a shape that nothing can have.
        if len(form.shape) > DIMENSIONS_MAX or any(not 0 <= size <= PAYLOAD_MAX_BYTES for size in form.shape):
            raise ValueError(f"array {form.name!r}: a shape of {len(form.shape)} dimensions that cannot be")
    if _end(forms) != len(payload):
        raise ValueError(f"{len(payload)} bytes for arrays of {_end(forms)}")


def _size(form: ArrayForm) -> int:
    return prod(form.shape) * DTYPE_BYTES[form.dtype]


def _offsets(forms: list[ArrayForm]) -> list[int]:
    offsets, end = [], 0
    for form in forms:
        offsets.append(-(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        end = offsets[-1] + _size(form)
    return offsets


def _end(forms: list[ArrayForm]) -> int:
    return _offsets(forms)[-1] + _size(forms[-1])
