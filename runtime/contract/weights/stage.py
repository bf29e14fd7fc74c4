"""Stages: the layers of a model that each worker of a pipeline has, and their part of the checkpoint.

The first stage has the embedding, the head and the small files besides its layers: it samples, so hidden states
travel between workers and logits, which are some hundred times as wide, never do. Layers are cut so that the
largest stage is as small as it can be, because a pipeline is ready when its last stage is (HydraServe section 4.1
cuts evenly; there the embedding weighs little).
"""

from __future__ import annotations

import msgspec

from ..ids import PipelineId
from .manifest import LAYER_NAME, Manifest, chunks_of

CONFIG_FILE = "config.json"
"""The file that every stage of a language model reads."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """The index-th stage of one pipeline, which is cut into layers `first .. end - 1` each."""

    pipeline: PipelineId
    index: int
    cuts: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        ends = (0, *(end for _, end in self.cuts))
        if not 0 <= self.index < len(self.cuts) or any(
            first != before or end <= first for before, (first, end) in zip(ends, self.cuts, strict=False)
        ):
            raise ValueError(f"stage {self.index} of {list(self.cuts)}: stages must tile the layers")

    @property
    def count(self) -> int:
        return len(self.cuts)

    @property
    def first(self) -> int:
        return self.cuts[self.index][0]

    @property
    def end(self) -> int:
        return self.cuts[self.index][1]


class LayerLayout(msgspec.Struct, frozen=True):
    """Sizes of a checkpoint's layers; `ends_bytes` is everything before the first layer and after the last."""

    ends_bytes: int
    layer_bytes: list[int]
    layer_chunks: list[tuple[int, int]] = []
    """(begin, end) of the chunks that each layer lies in. Empty: not known."""
    ends_chunks: list[tuple[int, int]] = []
    """(begin, end) of the chunks that the ends lie in, in order."""

    @property
    def total_bytes(self) -> int:
        return self.ends_bytes + sum(self.layer_bytes)


def layout_of(manifest: Manifest) -> LayerLayout:
    """Computes the layout of a checkpoint. Without numbered layers, everything is at the ends."""
    count = layer_count(manifest)
    layer_bytes = [0] * count
    chunks = [(len(manifest.chunks), 0)] * count
    ends: set[int] = set()
    for file in manifest.files.values():
        ends.update(chunks_of(manifest, file.offset, file.size_bytes))
    ends_bytes = sum(file.size_bytes for file in manifest.files.values())
    for entry in manifest.tensors.values():
        if 0 <= entry.layer < count:
            layer_bytes[entry.layer] += entry.size_bytes
            own = chunks_of(manifest, entry.offset, entry.size_bytes)
            begin, end = chunks[entry.layer]
            chunks[entry.layer] = (min(begin, own.start), max(end, own.stop)) if own else (begin, end)
        else:
            ends_bytes += entry.size_bytes
            ends.update(chunks_of(manifest, entry.offset, entry.size_bytes))
    return LayerLayout(ends_bytes, layer_bytes, [(min(begin, end), end) for begin, end in chunks], _ranges(ends))


def _ranges(chunks: set[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for chunk in sorted(chunks):
        if found and found[-1][1] == chunk:
            found[-1] = (found[-1][0], chunk + 1)
        else:
            found.append((chunk, chunk + 1))
    return found


def layer_count(manifest: Manifest) -> int:
    """Number of layers of the model; tensors after the last have its number as `layer`, but none in their names."""
    if isinstance(manifest.layers, int):
        return manifest.layers
    return max((entry.layer for name, entry in manifest.tensors.items() if LAYER_NAME.search(name)), default=-1) + 1


def cut(layout: LayerLayout, count: int) -> list[tuple[int, int]]:
    """Cuts the layers into stages, (first, end) each, so that the largest stage is as small as possible; none is empty.

    ValueError if there are fewer layers than stages.
    """
    layers = layout.layer_bytes
    if not 1 <= count <= len(layers):
        raise ValueError(f"{len(layers)} layers cannot be cut into {count} stages")
    low, high = max([*layers, layout.ends_bytes + layers[0]]), layout.total_bytes
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(layout, middle) <= count:
            high = middle
        else:
            low = middle + 1
    return _filled(layout, low, count)


def _stages_needed(layout: LayerLayout, most_bytes: int) -> int:
    stages, used_bytes = 1, layout.ends_bytes
    for size_bytes in layout.layer_bytes:
        if used_bytes + size_bytes > most_bytes:
            stages, used_bytes = stages + 1, 0
        used_bytes += size_bytes
    return stages


def _filled(layout: LayerLayout, most_bytes: int, count: int) -> list[tuple[int, int]]:
    """Fills stages up to that many bytes, each with at least one layer."""
    cuts: list[tuple[int, int]] = []
    layers, first = layout.layer_bytes, 0
    for index in range(count):
        left = count - index - 1
        used_bytes, end = (layout.ends_bytes if index == 0 else 0), first
        while end < len(layers) - left and (end == first or used_bytes + layers[end] <= most_bytes):
            used_bytes += layers[end]
            end += 1
        cuts.append((first, end))
        first = end
    return cuts


def stage_bytes(layout: LayerLayout, first: int, end: int) -> int:
    """Size of a stage's part of the checkpoint; the first has both ends of the model."""
    return sum(layout.layer_bytes[first:end]) + (layout.ends_bytes if first == 0 else 0)


def stage_chunks(manifest: Manifest, first: int, end: int) -> list[int]:
    """The chunks that a stage needs, in the order of use. A chunk on a cut belongs to both sides."""
    count = layer_count(manifest)
    wanted: set[int] = set()
    for entry in manifest.tensors.values():
        if first <= entry.layer < end or (first == 0 and not 0 <= entry.layer < count):
            wanted.update(chunks_of(manifest, entry.offset, entry.size_bytes))
    for name, file in manifest.files.items():
        if first == 0 or name == CONFIG_FILE:
            wanted.update(chunks_of(manifest, file.offset, file.size_bytes))
    return sorted(wanted)
