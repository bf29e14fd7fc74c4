"""Reads the header of a safetensors file, strictly, without the tensors and without torch.

The ways to be wrong are the checks below and no others: too short, header too large, not JSON, not a table of
tensors, unknown dtype, offsets outside the file, offsets that do not fit the shape, holes and overlaps, a file
cut short. After `read_header` every tensor's bytes are where it says.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from fleetstart.runtime.contract.errors import CheckpointInvalid, PickleRefused
from fleetstart.runtime.contract.manifest import DTYPE_BYTES

HEADER_MAX_BYTES = 100_000_000
"""The format's own limit."""
SHAPE_MAX_DIMENSIONS = 64

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor as its file has it; `offset` from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size_bytes: int


def read_header(file: Path) -> list[StoredTensor]:
    """All tensors of the file, in the order of their bytes. Errors: CheckpointInvalid, PickleRefused."""
    with file.open("rb") as stream:
        total = os.fstat(stream.fileno()).st_size
        head = stream.read(9)
        refuse_pickle(file, head)
        if len(head) < 8:
            raise CheckpointInvalid(f"{file}: {total} bytes are too few for a safetensors file")
        length = int.from_bytes(head[:8], "little")
        if length > HEADER_MAX_BYTES:
            raise CheckpointInvalid(
                f"{file}: a header of {length} bytes, {HEADER_MAX_BYTES} at most; is it safetensors?"
            )
        if 8 + length > total:
            raise CheckpointInvalid(f"{file}: truncated: expected {8 + length} bytes for the header, has {total}")
        header = head[8:] + stream.read(max(0, length - 1))
    tensors = [
        _tensor(file, name, entry, data_begin=8 + length)
        for name, entry in _decoded(file, header[:length]).items()
        if name != "__metadata__"
    ]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size_bytes, tensor.name))
    _check_tiling(file, tensors, data_begin=8 + length, total=total)
    return tensors


def refuse_pickle(file: Path, head: bytes) -> None:
    """A pickle runs code when it is opened, so it is refused by its name and by its first bytes."""
    # A safetensors header may begin with any length, but its ninth byte is always "{".
    by_content = head.startswith(_PICKLE_STARTS) and head[8:9] != b"{"
    if file.suffix.lower() in PICKLE_SUFFIXES or by_content:
        target = file.with_suffix(".safetensors").name
        raise PickleRefused(
            f"{file} is a pickle: opening it can run any code",
            hint=f'convert it once, where you trust it: python -c "import torch, safetensors.torch as s; '
            f"s.save_file({{k: v.contiguous() for k, v in torch.load('{file.name}', weights_only=True).items()}}, "
            f"'{target}')\"",
        )


def _decoded(file: Path, header: bytes) -> dict[str, Any]:
    try:
        table = msgspec.json.decode(header.rstrip(b" "))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointInvalid(f"{file}: the header is not readable: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointInvalid(f"{file}: the header is not a table of tensors")
    return table


def _tensor(file: Path, name: str, entry: object, *, data_begin: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)], **rest} if not rest:
            pass
        case _:
            raise CheckpointInvalid(f"{file}: tensor {name!r} needs dtype, shape and data_offsets, and nothing else")
    width = DTYPE_BYTES.get(dtype)
    if width is None:
        raise CheckpointInvalid(f"{file}: tensor {name!r} has dtype {dtype[:32]!r}, which is not known")
    if len(shape) > SHAPE_MAX_DIMENSIONS or not all(_is_count(dim) for dim in shape):
        raise CheckpointInvalid(f"{file}: tensor {name!r} has shape {shape[:8]}, which is not allowed")
    if not (_is_count(begin) and _is_count(end) and begin <= end):
        raise CheckpointInvalid(f"{file}: tensor {name!r} lies at {begin} to {end}")
    needed = prod(shape) * width
    if needed != end - begin:
        raise CheckpointInvalid(
            f"{file}: tensor {name!r} has {end - begin} bytes, its shape {shape[:8]} in {dtype} needs {needed}"
        )
    return StoredTensor(
        name=name, dtype=dtype, shape=tuple(shape), file=file, offset=data_begin + begin, size_bytes=end - begin
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_tiling(file: Path, tensors: list[StoredTensor], *, data_begin: int, total: int) -> None:
    end, before = data_begin, "the header"
    for tensor in tensors:
        if tensor.offset != end:
            how = "overlaps" if tensor.offset < end else "leaves a hole after"
            raise CheckpointInvalid(f"{file}: tensor {tensor.name!r} {how} {before}")
        end, before = tensor.offset + tensor.size_bytes, repr(tensor.name)
    if end > total:
        raise CheckpointInvalid(f"{file}: truncated: expected {end} bytes, has {total}")
    if end < total:
        raise CheckpointInvalid(f"{file}: {total - end} bytes after the last tensor belong to nothing")
