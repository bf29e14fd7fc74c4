"""Layout of a loading-optimised checkpoint: a pure plan of where each byte goes, made before any is copied.

Order: small files, then what runs before the first layer, then the layers by number, then the rest, so that a
stage of layers is one contiguous range and chunks arrive in the order of use (ServerlessLLM section 4.1).
Inside a layer tensors are ordered by name, not by their place in the source: equal weights get equal
checkpoints, however they were sharded. But projections of one input, q, k and v, gate and up, lie one behind the other
in one part, so that a device multiplies by all of them at once (`runtime.llm.model.projections`). A tensor that is
equal to another one (tied weights) is only a further name for it. Parts are cut at tensor boundaries; gaps that
alignment leaves are named pad tensors, because a safetensors file may have no holes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from fleetstart.runtime.contract.errors import CheckpointInvalid, InvalidSpec
from fleetstart.runtime.contract.object_keys import name_with_digest
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.weights.manifest import (
    ALIGNMENT_BYTES,
    CHUNK_BYTES,
    LAYER_BEFORE,
    LAYER_NAME,
    SEGMENT_MAX_BYTES,
    FileEntry,
    Manifest,
    Part,
    TensorEntry,
)

from .local_files import SourceFile
from .safetensors_header import StoredTensor
from .source import SmallFile, Source

PART_MAX_BYTES = 256 * MIB
"""Largest part. An interrupted upload repeats a part: 2 s at 1 Gbit/s, half a minute at home. A part has at least 64
chunks, so parallel ranges lose nothing at its ends, and a model of 140 GB has 600 parts, which listings and manifests
can hold. Resuming inside a part would be possible with S3, but not with a folder."""
CHUNKS_LEAST = 256
"""Least number of chunks in a checkpoint, as long as they are not too small. A stage has up to one chunk too much at
each of its ends: of a quarter of 256 chunks, a thirtieth at most."""
CHUNK_LEAST_BYTES = 256 * 1024
"""Smallest chunk: below this, the work for each chunk in threads and control block costs more than its bytes."""
HEADER_ALIGNMENT_BYTES = 4096
"""Data begins on a page, so that a reader may use direct I/O from the part's first tensor on."""
PAD_PREFIX = "__pad__."
PATTERN_MAX = 200
"""Longest pattern of layer names, in characters."""

TOGETHER_PARTS = 4
"""Largest part that projections of one input may have together, in parts: of a model with 400 billion parameters they
are cut."""
_PROJECTION = re.compile(r"(?<![^._])([qkv]|gate|up)_proj\.(weight|bias)$")
"""End of the name of a matrix or bias that is applied to the same input as others."""
_BEFORE = re.compile(
    r"(?:^|[._])(?:embed\w*|wte|wpe|tok_embeddings|patch_embed\w*|cls_token|pos_embed\w*|rotary_emb)(?:[._]|$)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPiece:
    """Bytes of a part from one source file; zeros if `file` is None."""

    file: SourceFile | None
    file_offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """Plan of one part: its header, and the source of its data."""

    object: str
    """Its name, before its digest is known."""
    header: bytes
    data_bytes: int
    segment_offset: int
    pieces: tuple[PartPiece, ...]

    @property
    def object_bytes(self) -> int:
        return len(self.header) + self.data_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksums:
    """What the first pass finds out about the bytes of a checkpoint, in the order of its parts."""

    chunks: list[int]
    """xxh3-64 of each chunk."""
    digests: list[str]
    """SHA-256 of each chunk, in hex."""
    parts: list[str]
    """SHA-256 of each part's object, header and all, in hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """Plan of a whole checkpoint."""

    parts: tuple[PartPlan, ...]
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    chunk_bytes: int
    aliases: dict[str, str] = field(default_factory=dict)
    layers: int | None = None
    """Number of layers, if the source has a pattern of their names."""

    @property
    def object_bytes(self) -> int:
        return sum(part.object_bytes for part in self.parts)

    @property
    def weight_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.tensors.values())

    def manifest(self, found: Checksums) -> Manifest:
        last = self.parts[-1]
        return Manifest(
            chunk_bytes=self.chunk_bytes,
            total_bytes=_rounded(last.segment_offset + last.data_bytes, self.chunk_bytes),
            parts=[
                Part(
                    object=name_with_digest(part.object, digest),
                    header_bytes=len(part.header),
                    data_bytes=part.data_bytes,
                    segment_offset=part.segment_offset,
                )
                for part, digest in zip(self.parts, found.parts, strict=True)
            ],
            chunks=found.chunks,
            digests=found.digests,
            tensors=self.tensors,
            files=self.files,
            aliases=self.aliases,
            layers=self.layers if self.layers is not None else msgspec.UNSET,
        )


def layer_numbers(names: Iterable[str], pattern: str = "") -> dict[str, int | None]:
    """Layer number in each name; None if a name has none.

    A pattern says how the names of layers begin, with `{}` for numbers ("layer{}.{}"). Layers are then counted in the
    order of these numbers, so that they need neither begin at 0 nor be without gaps. Errors: InvalidSpec.
    """
    if not pattern:
        return {name: int(match[1]) if (match := LAYER_NAME.search(name)) else None for name in names}
    if "{}" not in pattern or len(pattern) > PATTERN_MAX:
        raise InvalidSpec(
            f"layers={pattern[:80]!r} has no {{}} for a layer's number", hint='write layers="features.{}"'
        )
    prefix = re.compile(r"(\d{1,6})".join(map(re.escape, pattern.split("{}"))) + r"(?:\.|$)")
    found = {name: tuple(map(int, match.groups())) if (match := prefix.match(name)) else None for name in names}
    ranks = {numbers: rank for rank, numbers in enumerate(sorted({one for one in found.values() if one is not None}))}
    return {name: ranks[numbers] if numbers is not None else None for name, numbers in found.items()}


def layer_of_tensors(names: Iterable[str], pattern: str = "") -> dict[str, int]:
    """Layer in which each tensor is used: LAYER_BEFORE, 0.., and one past the last for tensors used after it."""
    numbered_names = layer_numbers(names, pattern)
    after = max((number for number in numbered_names.values() if number is not None), default=-1) + 1
    return {
        name: number if number is not None else (LAYER_BEFORE if _BEFORE.search(name) else after)
        for name, number in numbered_names.items()
    }


def in_order_of_use(tensors: Sequence[StoredTensor], pattern: str = "") -> list[StoredTensor]:
    """Sorts tensors in the order of use."""
    layers = layer_of_tensors((tensor.name for tensor in tensors), pattern)

    def place(tensor: StoredTensor) -> tuple[int, list[tuple[int, str]], str, str]:
        return layers[tensor.name], *_natural("".join(_together(tensor.name))), tensor.name

    return sorted(tensors, key=place)


def plan_checkpoint(
    source: Source,
    aliases: Mapping[str, str] | None = None,
    *,
    part_max_bytes: int = PART_MAX_BYTES,
    chunk_bytes: int = 0,
) -> CheckpointPlan:
    """Plans the checkpoint of a source. `aliases` are tensors that are not stored, each with the equal one that is;
    `chunk_bytes` 0 is chosen by size.

    Errors: CheckpointInvalid if there are no weights, too many, or names that the plan needs for itself.
    """
    aliases = aliases or {}
    if sum(tensor.size_bytes for tensor in source.tensors) == 0:
        raise CheckpointInvalid("the weights hold no bytes")
    for tensor in source.tensors:
        if tensor.name.startswith("__"):
            raise CheckpointInvalid(f"{tensor.file}: tensor name {tensor.name!r} is reserved")
    layers = layer_of_tensors((tensor.name for tensor in source.tensors), source.layers)
    ordered = [tensor for tensor in in_order_of_use(source.tensors, source.layers) if tensor.name not in aliases]
    items: list[SmallFile | StoredTensor] = [*sorted(source.files, key=lambda file: file.name), *ordered]
    chunk_bytes = chunk_bytes or chunk_size(sum(item.size_bytes for item in items))
    groups = _cut(items, part_max_bytes)
    layout = _Layout(layers=layers, count=len(groups), chunk_bytes=chunk_bytes)
    for group in groups:
        layout.add_part(group)
    if layout.segment_end > SEGMENT_MAX_BYTES:
        raise CheckpointInvalid(f"{layout.segment_end} bytes of weights, {SEGMENT_MAX_BYTES} at most")
    return CheckpointPlan(
        parts=tuple(layout.parts),
        tensors=layout.tensors,
        files=layout.files,
        chunk_bytes=chunk_bytes,
        aliases=dict(sorted(aliases.items())),
        layers=_count(source) if source.layers else None,
    )


def _count(source: Source) -> int:
    """Number of layers; the tensors of the last may all be stored under other names."""
    found = layer_numbers((tensor.name for tensor in source.tensors), source.layers)
    return max((number for number in found.values() if number is not None), default=-1) + 1


def chunk_size(total_bytes: int) -> int:
    """Largest power of two that cuts the bytes into CHUNKS_LEAST chunks, within CHUNK_LEAST_BYTES and CHUNK_BYTES."""
    size_bytes = CHUNK_BYTES
    while size_bytes > CHUNK_LEAST_BYTES and total_bytes < size_bytes * CHUNKS_LEAST:
        size_bytes //= 2
    return size_bytes


def _cut(items: Iterable[SmallFile | StoredTensor], part_max_bytes: int) -> list[list[SmallFile | StoredTensor]]:
    """Cuts items into groups of at most the given size; larger ones that belong together have a group of their own."""
    groups: list[list[SmallFile | StoredTensor]] = [[]]
    end = 0
    for unit in _units(items, part_max_bytes):
        needed = _room(unit)
        # Only an item with bytes opens a part: empty tensors alone make none.
        if end and needed and end + needed > part_max_bytes:
            groups.append([])
            end = 0
        groups[-1] += unit
        end += needed
    return groups


def _units(items: Iterable[SmallFile | StoredTensor], part_max_bytes: int) -> Iterator[list[SmallFile | StoredTensor]]:
    """Items that go into one part, in their order: projections of one input, or one item."""
    for _, found in itertools.groupby(items, key=lambda item: _together(item.name)[0]):
        unit = list(found)
        if _room(unit) <= TOGETHER_PARTS * part_max_bytes:
            yield unit
        else:
            yield from ([item] for item in unit)


def _room(items: Iterable[SmallFile | StoredTensor]) -> int:
    return sum(_rounded(item.size_bytes, ALIGNMENT_BYTES) for item in items)


def _together(name: str) -> tuple[str, str]:
    """Two parts of a name: the one that projections of one input share, and the rest, which other names do not have."""
    match = _PROJECTION.search(name)
    if match is None:
        return name, ""
    group = "qkv_proj" if len(match[1]) == 1 else "gate_up_proj"
    return f"{name[: match.start()]}{group}.{match[2]}.", match[1]


class _Layout:
    """Lays items one after the other, and counts the pads."""

    def __init__(self, *, layers: dict[str, int], count: int, chunk_bytes: int) -> None:
        self.parts: list[PartPlan] = []
        self.tensors: dict[str, TensorEntry] = {}
        self.files: dict[str, FileEntry] = {}
        self.segment_end = 0
        self._layers = layers
        self._count = count
        self._chunk_bytes = chunk_bytes
        self._pads = 0

    def add_part(self, items: Sequence[SmallFile | StoredTensor]) -> None:
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        pieces: list[PartPiece] = []
        end = 0
        for item in items:
            gap = -end % ALIGNMENT_BYTES
            if gap:
                table[f"{PAD_PREFIX}{self._pads}"] = _row("U8", (gap,), end, end + gap)
                pieces.append(PartPiece(file=None, file_offset=0, size_bytes=gap))
                self._pads += 1
                end += gap
            table[item.name] = self._place(item, end)
            offset = item.offset if isinstance(item, StoredTensor) else 0
            if item.size_bytes:
                pieces.append(PartPiece(file=item.file, file_offset=offset, size_bytes=item.size_bytes))
            end += item.size_bytes
        number = len(self.parts) + 1
        self.parts.append(
            PartPlan(
                object=f"part-{number:05d}-of-{self._count:05d}.safetensors",
                header=_header(table),
                data_bytes=end,
                segment_offset=self.segment_end,
                pieces=tuple(pieces),
            )
        )
        self.segment_end = _rounded(self.segment_end + end, self._chunk_bytes)

    def _place(self, item: SmallFile | StoredTensor, begin: int) -> dict[str, object]:
        offset = self.segment_end + begin
        if isinstance(item, SmallFile):
            self.files[item.name] = FileEntry(offset, item.size_bytes)
            return _row("U8", (item.size_bytes,), begin, begin + item.size_bytes)
        self.tensors[item.name] = TensorEntry(offset, item.size_bytes, item.dtype, item.shape, self._layers[item.name])
        return _row(item.dtype, item.shape, begin, begin + item.size_bytes)


def _row(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def _header(table: dict[str, object]) -> bytes:
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _natural(name: str) -> tuple[list[tuple[int, str]], str]:
    """Sorts "experts.10" after "experts.9", and "experts.09", which has the same number, apart from it."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() and part.isascii() else (-1, part) for part in parts], name


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step
