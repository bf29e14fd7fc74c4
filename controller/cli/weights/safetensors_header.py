"""Reads the header of a safetensors file, strictly, without the tensors and without torch.

The errors are these and no others: file too short, header too large, not JSON, a key that stands
twice, not a table of tensors, metadata that is not text, unknown dtype, offsets outside the file, offsets that do not
fit the shape, holes and overlaps, a file cut short. After `read_file` every tensor's bytes are where it says.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import PurePath
from typing import Any

import msgspec

from fleetstart.runtime.contract.errors import CheckpointInvalid, PickleRefused
from fleetstart.runtime.contract.weights.manifest import DTYPE_BYTES

from .local_files import SourceFile, read_at

HEADER_MAX_BYTES = 100_000_000
"""Largest header that the format allows."""
SHAPE_MAX_DIMENSIONS = 64
COUNT_MAX = (1 << 63) - 1
"""Largest offset and dimension, as in other readers of the format."""
METADATA = "__metadata__"

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_SUB_BYTE = frozenset({"F4", "F6_E2M3", "F6_E3M2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a safetensors file; `offset` is from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: SourceFile
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A safetensors file; `header` is the text between the length and the first tensor."""

    origin: SourceFile
    header: bytes
    tensors: tuple[StoredTensor, ...]


def read_file(file: SourceFile) -> StoredFile:
    """Reads a file's header; tensors are in the order of their bytes. Errors: CheckpointInvalid, PickleRefused."""
    total = file.size_bytes
    head = read_at(file, 0, min(9, total))
    refuse_pickle(file, head)
    if len(head) < 8:
        raise CheckpointInvalid(f"{file}: {total} bytes are too few for a safetensors file")
    length = int.from_bytes(head[:8], "little")
    if length > HEADER_MAX_BYTES:
        raise CheckpointInvalid(f"{file}: a header of {length} bytes, {HEADER_MAX_BYTES} at most; is it safetensors?")
    if 8 + length > total:
        raise CheckpointInvalid(f"{file}: truncated: expected {8 + length} bytes for the header, has {total}")
    header = read_at(file, 8, length)
    tensors = parse_header(file, header)
    end = tensors[-1].offset + tensors[-1].size_bytes if tensors else 8 + length
    if end > total:
        raise CheckpointInvalid(f"{file}: truncated: expected {end} bytes, has {total}")
    if end < total:
        raise CheckpointInvalid(f"{file}: {total - end} bytes after the last tensor belong to nothing")
    return StoredFile(origin=file, header=header, tensors=tuple(tensors))


def parse_header(file: SourceFile, header: bytes) -> list[StoredTensor]:
    """Tensors of a header, without a look at the data that follows. Errors: CheckpointInvalid."""
    tensors = [
        _tensor(file, name, entry, data_begin=8 + len(header))
        for name, entry in _decoded(file, header).items()
        if name != METADATA
    ]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size_bytes, tensor.name))
    _check_tiling(file, tensors, data_begin=8 + len(header))
    return tensors


def refuse_pickle(file: SourceFile, head: bytes) -> None:
    """Rejects a pickle, by its name and by its first bytes: opening one runs code. Errors: PickleRefused."""
    # A safetensors header may begin with any length, but its ninth byte is always "{".
    by_content = head.startswith(_PICKLE_STARTS) and head[8:9] != b"{"
    path = PurePath(file.name)
    if path.suffix.lower() in PICKLE_SUFFIXES or by_content:
        target = path.with_suffix(".safetensors").name
        raise PickleRefused(
            f"{file} is a pickle: opening it can run any code",
            hint=f'convert it once, where you trust it: python -c "import torch, safetensors.torch as s; '
            f"s.save_file({{k: v.contiguous() for k, v in torch.load('{path.name}', weights_only=True).items()}}, "
            f"'{target}')\"",
        )


def _decoded(file: SourceFile, header: bytes) -> dict[str, Any]:
    """The header's table. Decoded twice: msgspec is the stricter reader, but keeps the last of two equal keys, and
    reads -0, which is no whole number to others."""
    if not header.startswith(b"{"):
        raise CheckpointInvalid(f"{file}: the header is not a table of tensors")
    try:
        table: dict[str, Any] = msgspec.json.decode(header)
        json.loads(header, object_pairs_hook=_unique_keys, parse_int=_whole)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CheckpointInvalid(f"{file}: the header is not readable: {error}") from error
    match table.get(METADATA, {}):
        case dict(metadata) if all(isinstance(value, str) for value in metadata.values()):
            return table
    raise CheckpointInvalid(f"{file}: {METADATA} is not a table of text")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise ValueError(f"{twice[:80]!r} stands twice in it")
    return table


def _whole(digits: str) -> int:
    if digits == "-0":
        raise ValueError("-0 is no whole number")
    return 0  # what it is, msgspec has read


def _tensor(file: SourceFile, name: str, entry: object, *, data_begin: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)], **rest} if not rest:
            pass
        case _:
            raise CheckpointInvalid(f"{file}: tensor {name!r} needs dtype, shape and data_offsets, and nothing else")
    if len(shape) > SHAPE_MAX_DIMENSIONS or not all(_is_count(dim) for dim in shape):
        raise CheckpointInvalid(f"{file}: tensor {name!r} has shape {_shown(shape)}, which is not allowed")
    if not (_is_count(begin) and _is_count(end) and begin <= end):
        raise CheckpointInvalid(f"{file}: tensor {name!r} lies at {begin} to {end}")
    needed = prod(shape) * _width(file, name, dtype)
    if needed != end - begin:
        raise CheckpointInvalid(
            f"{file}: tensor {name!r} has {end - begin} bytes, its shape {_shown(shape)} in {dtype} needs {needed}"
        )
    return StoredTensor(
        name=name, dtype=dtype, shape=tuple(shape), file=file, offset=data_begin + begin, size_bytes=end - begin
    )


def _width(file: SourceFile, name: str, dtype: str) -> int:
    width = DTYPE_BYTES.get(dtype)
    if width is not None:
        return width
    if dtype in _SUB_BYTE:
        raise CheckpointInvalid(
            f"{file}: tensor {name!r} has dtype {dtype}, whose elements are smaller than a byte",
            hint="store it packed in U8, as quantised models do, and unpack it in the handler",
        )
    raise CheckpointInvalid(
        f"{file}: tensor {name!r} has dtype {dtype[:32]!r}, which is not known",
        hint=f"known are {', '.join(DTYPE_BYTES)}",
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= COUNT_MAX


def _shown(shape: list[Any]) -> str:
    text = str(shape[:8])
    return text if len(text) <= 200 else text[:197] + "..."


def _check_tiling(file: SourceFile, tensors: list[StoredTensor], *, data_begin: int) -> None:
    end, before = data_begin, "the header"
    for tensor in tensors:
        if tensor.offset != end:
            how = "overlaps" if tensor.offset < end else "leaves a hole after"
            raise CheckpointInvalid(f"{file}: tensor {tensor.name!r} {how} {before}")
        end, before = tensor.offset + tensor.size_bytes, repr(tensor.name)
