"""A sketch of durations: counts in buckets that are exact to 7 ms and then grow by a fixed factor. Pure.

Two sketches merge by adding their counts, without error: the sketch of many calls is the sum of those of its parts,
whichever gateway or minute these were of. The idea is that of HdrHistogram and DDSketch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

STEP = 1.15
"""A quantile is too high by 15 % at most. Above 7 ms, where a step is a millisecond or more, buckets grow by it."""
EXACT_MS = 7
LONGEST_MS = 24 * 3600 * 1000
"""A longer duration counts as this one."""


def _bounds_ms() -> tuple[float, ...]:
    found = [float(bound) for bound in range(EXACT_MS + 1)]
    while found[-1] < LONGEST_MS:
        found.append(found[-1] * STEP)
    return tuple(found)


BOUNDS_MS = _bounds_ms()
"""The longest duration of each bucket."""


def bucket_index(duration_ms: float) -> int:
    """The index of the bucket that a duration falls into."""
    return min(bisect_left(BOUNDS_MS, duration_ms), len(BOUNDS_MS) - 1)


def quantile(counts: Mapping[int, int], share: float) -> float | None:
    """Milliseconds that this share of the durations took at most; None without any."""
    wanted = share * sum(counts.values())
    seen = 0
    for index in sorted(counts):
        seen += counts[index]
        if seen >= wanted and seen:
            return BOUNDS_MS[index]
    return None
