"""The layout of a checkpoint for the planner: size and layers of each stage of each cut.

Sets of layers are integers, one bit a layer, so that "what does this node lack" is one operation. The first layer's
bit stands for both ends of the model too, as in `contract.weights.stage`. A checkpoint without numbered layers has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from fleetstart.runtime.contract.weights.stage import LayerLayout, cut, stage_bytes

EVERY_LAYER = -1
"""The set of all layers, however many."""


class Cut(NamedTuple):
    """A stage of a cut: layers `first .. end - 1`."""

    first: int
    end: int
    size_bytes: int
    layers: int
    """The layers as a bit set."""
    share: float
    """Share of the model's layers, and so of its arithmetic."""


class CheckpointLayout:
    """A checkpoint's layers and their sizes. Caches cuts: a cut is a search, and each start needs the same few."""

    __slots__ = ("_before_bytes", "_cuts", "_every", "_layout", "count", "total_bytes")

    def __init__(self, layout: LayerLayout) -> None:
        self._layout = layout if layout.layer_bytes else LayerLayout(0, [layout.total_bytes])
        self._cuts: dict[int, tuple[Cut, ...]] = {}
        self.count = len(self._layout.layer_bytes)
        """Number of layers; no pipeline has more stages."""
        self.total_bytes = layout.total_bytes
        self._every = layer_set(0, self.count)
        ends_first = [self._layout.layer_bytes[0] + self._layout.ends_bytes, *self._layout.layer_bytes[1:]]
        self._before_bytes = [0, *accumulate(ends_first)]

    def cuts(self, stages: int) -> tuple[Cut, ...]:
        """The stages of a cut into that many. Errors: ValueError if there are fewer layers."""
        known = self._cuts.get(stages)
        if known is None:
            known = self._cuts[stages] = tuple(self.stage(*ends) for ends in cut(self._layout, stages))
        return known

    @property
    def whole(self) -> Cut:
        """The one stage of a single worker."""
        return self.cuts(1)[0]

    def stage(self, first: int, end: int) -> Cut:
        size_bytes = stage_bytes(self._layout, first, end)
        return Cut(first, end, size_bytes, layer_set(first, end), (end - first) / self.count)

    @property
    def ends_chunks(self) -> Sequence[tuple[int, int]]:
        """(begin, end) of the chunks that both ends of the model lie in; empty if they are not known."""
        return self._layout.ends_chunks if self._layout.layer_chunks else ()

    @property
    def layer_chunks(self) -> Sequence[Sequence[tuple[int, int]]]:
        """(begin, end) of the chunks of each layer, those of both ends with the first; empty if they are not known."""
        ends, chunks = self._layout.ends_chunks, self._layout.layer_chunks
        return [[*(ends if not layer else ()), one] for layer, one in enumerate(chunks)]

    def layers_in(self, ranges: Sequence[tuple[int, int]]) -> int:
        """The layers whose chunks all lie in these (begin, end) ranges; none if the layers' chunks are not known."""
        chunks = self._layout.layer_chunks
        if not chunks or not ranges:
            return 0
        ordered = sorted(ranges)
        complete = sum(1 << layer for layer, chunks_of_layer in enumerate(chunks) if _inside(chunks_of_layer, ordered))
        ends = all(_inside(chunks_of_layer, ordered) for chunks_of_layer in self._layout.ends_chunks)
        return complete if ends else complete & ~1

    def size_bytes(self, layers: int) -> int:
        """Size of a set of layers: a sum over its runs, of which there are few."""
        layers &= self._every
        total_bytes = 0
        while layers:
            first = (layers & -layers).bit_length() - 1
            above = (layers >> first) + 1
            end = first + (above & -above).bit_length() - 1
            total_bytes += self._before_bytes[end] - self._before_bytes[first]
            layers &= -1 << end
        return total_bytes


def _inside(chunks: tuple[int, int], ranges: Sequence[tuple[int, int]]) -> bool:
    """True if disjoint, ordered ranges, which may touch, cover a range."""
    at, end = chunks
    for begin, stop in ranges:
        if at >= end or begin > at:
            break
        at = max(at, stop)
    return at >= end


def layer_set(first: int, end: int) -> int:
    return (1 << end) - (1 << first)


def checkpoint_layout(layout: LayerLayout | None, segment_bytes: int) -> CheckpointLayout:
    """The layout of a version's checkpoint; one indivisible layer if its layers are not known."""
    return CheckpointLayout(layout if layout is not None else LayerLayout(segment_bytes, []))
