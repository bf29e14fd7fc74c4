"""Ranges of chunks, (begin, end) each: sorted, disjoint and not touching each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]


def union(*parts: Iterable[tuple[int, int]]) -> Ranges:
    """The chunks of all parts."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(one for part in parts for one in part):
        if begin >= end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return tuple(found)


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """The chunks of `ranges` that are not among the others."""
    left: list[tuple[int, int]] = []
    for begin, end in ranges:
        for first, stop in others:
            if stop <= begin or end <= first:
                continue
            if begin < first:
                left.append((begin, first))
            begin = stop
            if begin >= end:
                break
        if begin < end:
            left.append((begin, end))
    return tuple(left)


def count(ranges: Ranges) -> int:
    return sum(end - begin for begin, end in ranges)
