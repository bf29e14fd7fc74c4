"""Writes a copy of a model whose layers' matrices are in int8, as compressed-tensors stores them.

Embedding, head, norms and biases stay as they are, and so do the files beside the weights but for config.json, which
says what was done. No file has its final name before all of them are complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from fleetstart.runtime.contract.errors import CheckpointInvalid, InvalidInput
from fleetstart.runtime.contract.weights.decoder_config import read_config
from fleetstart.runtime.contract.weights.manifest import LAYER_NAME
from fleetstart.runtime.contract.weights.quantization import INT8_CONFIG, SCALE_SUFFIX, quantization_of

from ..weights.export import PARTIAL, claim_empty_folder, named_when_complete
from ..weights.local_files import GeneratedFile, read_all, read_at
from ..weights.safetensors_header import StoredTensor
from ..weights.source import Source
from .int8_rows import FLOATS, rounded

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedCopy:
    """A copy that was written. `matrices`: how many are in int8."""

    files: list[Path]
    matrices: int
    weight_bytes: int
    stored_bytes: int
    """Of the weights before."""


def write_quantized(source: Source, folder: Path, progress: Callable[[str, int, int], None]) -> QuantizedCopy:
    """Writes the copy into an empty folder.

    Errors: CheckpointInvalid for a model that the native engine does not run, or without a matrix to quantise;
    InvalidInput for one that is quantised, and for a folder that is not empty.
    """
    config = _quantized_config(source)
    matrices = [tensor for tensor in source.tensors if _is_matrix(tensor)]
    if not matrices:
        raise CheckpointInvalid("the model has no matrix in fp32, fp16 or bf16 in any layer: nothing to quantise")
    head = _header(source)
    small = {one.name: one.file for one in source.files if not isinstance(one.file, GeneratedFile)}
    claim_empty_folder(folder)
    names = [WEIGHTS, *small]
    with named_when_complete(folder, names):
        with (folder / (WEIGHTS + PARTIAL)).open("xb") as file:
            file.write(head)
            _write_tensors(source, file, progress)
        for name, origin in small.items():
            (folder / (name + PARTIAL)).write_bytes(config if name == CONFIG else read_all(origin))
    return QuantizedCopy(
        files=[folder / name for name in names],
        matrices=len(matrices),
        weight_bytes=sum(size_bytes for _, _, _, size_bytes in map(_as_stored, source.tensors)),
        stored_bytes=sum(tensor.size_bytes for tensor in source.tensors),
    )


def _quantized_config(source: Source) -> bytes:
    found = next((one.file for one in source.files if one.name == CONFIG), None)
    if found is None:
        raise CheckpointInvalid(f"the model has no {CONFIG}", hint=f"name a folder with {CONFIG} and the safetensors")
    config = read_all(found)
    fields: dict[str, Any] = msgspec.json.decode(config) if read_config(config) else {}
    if quantization_of(fields) is not None:
        raise InvalidInput(f"{found} says that these weights are quantised already")
    return (json.dumps(fields | {"quantization_config": INT8_CONFIG}, indent=2) + "\n").encode()


def _is_matrix(tensor: StoredTensor) -> bool:
    """Checks whether a tensor is the matrix of a linear map in a layer."""
    return (
        len(tensor.shape) == 2
        and tensor.size_bytes > 0
        and tensor.dtype in FLOATS
        and tensor.name.endswith(".weight")
        and LAYER_NAME.search(tensor.name) is not None
    )


def _as_stored(tensor: StoredTensor) -> tuple[StoredTensor, str, int, int]:
    """A tensor with its dtype in the copy, its bytes, and these with its factors."""
    if not _is_matrix(tensor):
        return tensor, tensor.dtype, tensor.size_bytes, tensor.size_bytes
    rows, columns = tensor.shape
    return tensor, "I8", rows * columns, rows * columns + 4 * rows


def _header(source: Source) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor, dtype, size_bytes, whole_bytes in map(_as_stored, source.tensors):
        table[tensor.name] = {
            "dtype": dtype, "shape": list(tensor.shape), "data_offsets": [end, end + size_bytes],
        }  # fmt: skip
        if whole_bytes > size_bytes:
            table[tensor.name + SCALE_SUFFIX] = {
                "dtype": "F32", "shape": [tensor.shape[0], 1], "data_offsets": [end + size_bytes, end + whole_bytes],
            }  # fmt: skip
        end += whole_bytes
    header = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _write_tensors(source: Source, file: BinaryIO, progress: Callable[[str, int, int], None]) -> None:
    done, total = 0, sum(tensor.size_bytes for tensor in source.tensors)
    for tensor in source.tensors:
        if _is_matrix(tensor):
            rows, columns = tensor.shape
            data = read_at(tensor.file, tensor.offset, tensor.size_bytes)
            for part in rounded(data, tensor.dtype, (rows, columns), tensor.name):
                file.write(part)
        else:
            for block in tensor.file.blocks(tensor.offset, tensor.size_bytes):
                file.write(block)
        done += tensor.size_bytes
        progress("round", done, total)
