"""Reads the tensors and small files of a model: a folder in the style of Hugging Face, or single files.

A folder is one model (`model.safetensors`, or shards with their index) or one LoRA adapter in PEFT's format. What an
index says of a tensor's shard holds; shards that it does not name are not looked at, as every other reader does it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import msgspec

from fleetstart.runtime.contract.errors import CheckpointInvalid, WeightsMissing
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.weights import token_table
from fleetstart.runtime.contract.weights.lora import CONFIG, CONFIG_MAX_BYTES, read_adapter

from .local_files import GeneratedFile, LocalFile, LocalFolder, SourceFile, SourceFolder, read_all
from .safetensors_header import PICKLE_SUFFIXES, StoredFile, StoredTensor, read_file, refuse_pickle
from .token_table import build_table

ADAPTER = "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"
INDEX_MAX_BYTES = 64 * MIB
FILE_MAX_BYTES = 64 * MIB
"""Largest file beside the weights. It is part of the checkpoint and given to the worker whole: a tokenizer, not a data
set."""
FILE_SUFFIXES = frozenset({".json", ".txt", ".jinja", ".model", ".tiktoken", ".vocab", ".yaml", ".yml"})

LOST = "the download may not have ended: fetch the missing shard, or the whole model again"
_SHARD = re.compile(r"(?P<begin>.+)-\d{5}-of-(?P<count>\d{5})\.safetensors")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFile:
    """A file beside the weights."""

    name: str
    file: SourceFile
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Tensors and small files of one model or adapter."""

    tensors: tuple[StoredTensor, ...]
    files: tuple[SmallFile, ...]
    shards: tuple[StoredFile, ...] = ()
    """Safetensors files as they were, for an export."""
    index: bytes | None = None
    adapter: bool = False
    layers: str = ""
    """Pattern of the layers' names, with `{}` for numbers; "" for the usual names."""

    def source_files(self) -> list[SourceFile]:
        """All files that are read, each once."""
        found = {str(origin): origin for origin in (tensor.file for tensor in self.tensors)}
        found.update((str(file.file), file.file) for file in self.files)
        return [found[name] for name in sorted(found)]


def read_source(weights: Path) -> Source:
    """Reads the model at a path: headers and sizes only. Errors: WeightsMissing, PickleRefused, CheckpointInvalid."""
    if not weights.exists():
        raise WeightsMissing(
            f"weights {weights} do not exist",
            hint="the path is relative to the handler's folder; the examples' weights come from `make models`",
        )
    return read_single(LocalFile(weights)) if weights.is_file() else read_folder(LocalFolder(weights))


def read_single(origin: SourceFile) -> Source:
    """Reads one safetensors file, without the files beside it."""
    shard = read_file(origin)
    return Source(tensors=_unique([shard], {}), files=(), shards=(shard,))


def read_folder(folder: SourceFolder) -> Source:
    """Reads a folder with a model or a LoRA adapter."""
    origins = folder.source_files()
    if CONFIG in origins:
        return _adapter(folder, origins)
    index = origins.get(INDEX)
    text = _index_text(index) if index is not None else None
    weight_map = _weight_map(folder, index, text, origins) if index is not None and text is not None else {}
    names = sorted(set(weight_map.values())) if index is not None else _shard_names(folder, origins)
    shards = [read_file(origins[name]) for name in names]
    tensors = _unique(shards, weight_map)
    _check_index(index, weight_map, tensors)
    files = _small_files(origins, tensors)
    return Source(tensors=tensors, files=(*files, *_made_files(files)), shards=tuple(shards), index=text)


def _adapter(folder: SourceFolder, origins: dict[str, SourceFile]) -> Source:
    found = [name for name in origins if name.endswith(".safetensors")]
    if ADAPTER not in found:
        for name in (ADAPTER, *origins):
            if name in origins and PurePath(name).suffix.lower() in PICKLE_SUFFIXES:
                refuse_pickle(origins[name], b"")
        raise WeightsMissing(f"{folder} has {CONFIG}, but no {ADAPTER}", hint=f"put {ADAPTER} there")
    if len(found) > 1:
        raise CheckpointInvalid(
            f"{folder} holds a LoRA adapter and a model: {', '.join(found[:4])}",
            hint="push each by its files, or from a folder of its own",
        )
    shard = read_file(origins[ADAPTER])
    tensors = _unique([shard], {})
    config = origins[CONFIG]
    if config.size_bytes > CONFIG_MAX_BYTES:
        raise CheckpointInvalid(f"{config} has {config.size_bytes} bytes, {CONFIG_MAX_BYTES} at most")
    read_adapter(read_all(config), ((tensor.name, tensor) for tensor in tensors), patterns=True)
    files = _small_files(origins, tensors)
    return Source(tensors=tensors, files=tuple(files), shards=(shard,), adapter=True)


def _shard_names(folder: SourceFolder, origins: dict[str, SourceFile]) -> list[str]:
    found = [name for name in origins if name.endswith(".safetensors")]
    if found:
        _require_siblings(folder, origins, found)
        return found
    for name, origin in origins.items():
        if PurePath(name).suffix.lower() in PICKLE_SUFFIXES:
            refuse_pickle(origin, b"")
    raise WeightsMissing(f"{folder} has no *.safetensors", hint="put model.safetensors there, with its config.json")


def _require_siblings(folder: SourceFolder, origins: dict[str, SourceFile], names: Sequence[str]) -> None:
    """Checks that all shards of a row are there, where no index names them. Errors: WeightsMissing with the first."""
    rows = {(match["begin"], match["count"]) for match in map(_SHARD.fullmatch, names) if match is not None}
    for begin, count in sorted(rows):
        for number in range(1, int(count) + 1):
            name = f"{begin}-{number:05}-of-{count}.safetensors"
            if name not in origins:
                raise WeightsMissing(f"{folder} has some of {int(count)} shards, and not {name!r}", hint=LOST)


def _index_text(index: SourceFile) -> bytes:
    if index.size_bytes > INDEX_MAX_BYTES:
        raise CheckpointInvalid(f"{index} has {index.size_bytes} bytes, {INDEX_MAX_BYTES} at most for an index")
    return read_all(index)


def _weight_map(folder: SourceFolder, index: SourceFile, text: bytes, origins: dict[str, SourceFile]) -> dict[str, str]:
    """The shard that holds each tensor, by the index; every shard must be a file of the folder."""
    try:
        table: Any = msgspec.json.decode(text)
        weight_map = dict(table["weight_map"].items())
    except (msgspec.DecodeError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointInvalid(f"{index}: not an index with a weight_map: {error}") from error
    if not weight_map:
        raise CheckpointInvalid(f"{index}: its weight_map names no tensor")
    for name in sorted(set(map(str, weight_map.values()))):
        if name not in origins or not name.endswith(".safetensors"):
            if name in origins:
                refuse_pickle(origins[name], b"")
            raise WeightsMissing(
                f"{index} names the shard {name[:200]!r}, which is not in {folder}",
                hint=LOST,
            )
    return {str(tensor): str(name) for tensor, name in weight_map.items()}


def _check_index(index: SourceFile | None, weight_map: dict[str, str], tensors: Sequence[StoredTensor]) -> None:
    found = {tensor.name for tensor in tensors}
    for name, shard in weight_map.items():
        if name not in found:
            raise CheckpointInvalid(
                f"{index} says that tensor {name!r} is in {shard}, and it is not",
                hint="index and shards are of different models, or of different versions of one",
            )


def _unique(shards: Iterable[StoredFile], weight_map: dict[str, str]) -> tuple[StoredTensor, ...]:
    """All tensors; for one that is in several shards, the one that the index names."""
    seen: dict[str, StoredTensor] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if weight_map.get(tensor.name, shard.origin.name) != shard.origin.name:
                continue
            if tensor.name in seen:
                raise CheckpointInvalid(f"tensor {tensor.name!r} is in {seen[tensor.name].file} and in {tensor.file}")
            seen[tensor.name] = tensor
    return tuple(seen.values())


def _made_files(files: Iterable[SmallFile]) -> list[SmallFile]:
    """Generated files, which workers read in place of files that are slow to parse."""
    made = []
    for file in files:
        if file.name == "tokenizer.json" and (table := build_table(read_all(file.file))) is not None:
            made.append(
                SmallFile(name=token_table.FILE, file=GeneratedFile(token_table.FILE, table), size_bytes=len(table))
            )
    return made


def _small_files(origins: dict[str, SourceFile], tensors: Iterable[StoredTensor]) -> list[SmallFile]:
    names = {tensor.name for tensor in tensors}
    files = []
    for name, origin in origins.items():
        if PurePath(name).suffix.lower() not in FILE_SUFFIXES or name == INDEX:
            continue
        size_bytes = origin.size_bytes
        if not _FILE_NAME.fullmatch(name) or name in names:
            raise CheckpointInvalid(
                f"{origin}: a file of this name cannot travel with the weights; rename or remove it"
            )
        if size_bytes > FILE_MAX_BYTES:
            raise CheckpointInvalid(
                f"{origin} has {size_bytes} bytes, {FILE_MAX_BYTES} at most for a file beside the weights"
            )
        files.append(SmallFile(name=name, file=origin, size_bytes=size_bytes))
    return files
