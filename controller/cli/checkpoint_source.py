"""Finds the tensors and small files behind `weights=...`: a folder in the style of Hugging Face, or one file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fleetstart.controller.cli.safetensors_header import PICKLE_SUFFIXES, StoredTensor, read_header, refuse_pickle
from fleetstart.controller.cli.token_table import build_table
from fleetstart.runtime.contract import token_table
from fleetstart.runtime.contract.errors import CheckpointInvalid, WeightsMissing
from fleetstart.runtime.contract.function import MIB

INDEX = "model.safetensors.index.json"
FILE_MAX_BYTES = 64 * MIB
"""A file travels with the weights and is handed to the worker whole: a tokenizer, not a data set."""
FILE_SUFFIXES = frozenset({".json", ".txt", ".jinja", ".model", ".tiktoken", ".vocab", ".yaml", ".yml"})

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFile:
    name: str
    file: Path
    """What it is, or was made from."""
    size_bytes: int
    made: bytes | None = None
    """Its bytes, if it is no file of the user's but was made for the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    tensors: tuple[StoredTensor, ...]
    files: tuple[SmallFile, ...]

    def paths(self) -> list[Path]:
        """Every file that is read, once."""
        return sorted({tensor.file for tensor in self.tensors} | {file.file for file in self.files})


def read_source(weights: Path) -> Source:
    """Reads headers and sizes only. Errors: WeightsMissing, PickleRefused, CheckpointInvalid."""
    if not weights.exists():
        raise WeightsMissing(
            f"weights {weights} do not exist",
            hint="the path is relative to the handler's folder; the examples' weights come from `make models`",
        )
    if weights.is_file():
        return Source(tensors=_unique(read_header(weights)), files=())
    shards = _shards(weights)
    tensors = _unique(tensor for shard in shards for tensor in read_header(shard))
    files = _small_files(weights, tensors)
    return Source(tensors=tensors, files=(*files, *_made_files(files)))


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        return _indexed(folder, index)
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return found
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() in PICKLE_SUFFIXES:
            refuse_pickle(file, b"")
    raise WeightsMissing(f"{folder} has no *.safetensors", hint="put model.safetensors there, with its config.json")


def _indexed(folder: Path, index: Path) -> list[Path]:
    try:
        table: Any = msgspec.json.decode(index.read_bytes())
        names = set(table["weight_map"].values())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointInvalid(f"{index}: not an index with a weight_map: {error}") from error
    shards = []
    for name in sorted(names, key=str):
        if not isinstance(name, str) or "/" in name or not (folder / name).is_file():
            raise WeightsMissing(f"{index} names the shard {name!r}, which is not in {folder}")
        shards.append(folder / name)
    return shards


def _unique(tensors: Iterable[StoredTensor]) -> tuple[StoredTensor, ...]:
    seen: dict[str, StoredTensor] = {}
    for tensor in tensors:
        if tensor.name in seen:
            raise CheckpointInvalid(f"tensor {tensor.name!r} is in {seen[tensor.name].file} and in {tensor.file}")
        seen[tensor.name] = tensor
    return tuple(seen.values())


def _made_files(files: Iterable[SmallFile]) -> list[SmallFile]:
    """What workers read in place of files that are slow to parse."""
    made = []
    for file in files:
        if file.name == "tokenizer.json" and (table := build_table(file.file.read_bytes())) is not None:
            made.append(SmallFile(name=token_table.FILE, file=file.file, size_bytes=len(table), made=table))
    return made


def _small_files(folder: Path, tensors: Iterable[StoredTensor]) -> list[SmallFile]:
    names = {tensor.name for tensor in tensors}
    files = []
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() not in FILE_SUFFIXES or path.name == INDEX or not path.is_file():
            continue
        size_bytes = path.stat().st_size
        if not _FILE_NAME.fullmatch(path.name) or path.name in names:
            raise CheckpointInvalid(f"{path}: a file of this name cannot travel with the weights; rename or remove it")
        if size_bytes > FILE_MAX_BYTES:
            raise CheckpointInvalid(
                f"{path} has {size_bytes} bytes, {FILE_MAX_BYTES} at most for a file beside the weights"
            )
        files.append(SmallFile(name=path.name, file=path, size_bytes=size_bytes))
    return files
