"""Division of a fetch over its sources, which are read in parallel: each layer comes from the one that delivers it
soonest.

Layers that fewer sources have are given out first, as they have less choice; those that several have are divided so
that these end together. Sets of layers are integers, one bit a layer (`checkpoint_layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class FetchSource(NamedTuple):
    """A source of some layers, and the rate at which it delivers them to this fetch."""

    layers: int
    bytes_per_s: float


def divide(layers: int, sources: Sequence[FetchSource], size_bytes: Callable[[int], int]) -> list[float]:
    """Bytes to fetch from each source. Layers that no source has are left out; `size_bytes` is the size of a set."""
    if all([not layers & ~source.layers for source in sources]):
        rate = sum([source.bytes_per_s for source in sources])
        total_bytes = size_bytes(layers)
        return [total_bytes * source.bytes_per_s / rate for source in sources]
    shares = [0.0] * len(sources)
    for owners, owned in sorted(_by_owners(layers, sources), key=lambda pair: len(pair[0])):
        _fill(shares, owners, sources, size_bytes(owned))
    return shares


def _by_owners(layers: int, sources: Sequence[FetchSource]) -> list[tuple[tuple[int, ...], int]]:
    """The sets of layers that the same sources have, with the indices of these."""
    parts: list[tuple[tuple[int, ...], int]] = [((), layers)]
    for index, source in enumerate(sources):
        split: list[tuple[tuple[int, ...], int]] = []
        for owners, part in parts:
            if part & source.layers:
                split.append(((*owners, index), part & source.layers))
            if part & ~source.layers:
                split.append((owners, part & ~source.layers))
        parts = split
    return [(owners, part) for owners, part in parts if owners and part]


def _fill(shares: list[float], owners: Sequence[int], sources: Sequence[FetchSource], size_bytes: float) -> None:
    """Divides bytes over sources so that all that get any end at the same time, later than those that get none."""
    busy = sorted((shares[index] / sources[index].bytes_per_s, index) for index in owners)
    rate = got_bytes = 0.0
    end_s = 0.0
    for number, (_, index) in enumerate(busy):
        rate += sources[index].bytes_per_s
        got_bytes += shares[index]
        end_s = (size_bytes + got_bytes) / rate
        if number + 1 == len(busy) or end_s <= busy[number + 1][0]:
            break
    for busy_s, index in busy:
        if busy_s < end_s:
            shares[index] = end_s * sources[index].bytes_per_s
