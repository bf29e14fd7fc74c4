"""Eviction policy: which segments to evict, by benefit a byte. Pure.

Benefit is the cost of fetching a segment again times the likelihood of its next use: how often it was used, halved
for each `HALF_LIFE_S` without use. Segments in use or still filling are never evicted. Without any history this is
least recently used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fleetstart.runtime.contract.ids import CheckpointId

HALF_LIFE_S = 600.0
"""Functions that are called at all are called again within minutes; after an hour a segment counts 1/64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionCandidate:
    """A segment, or an image on the disk, as the policy sees it."""

    checkpoint: CheckpointId
    size_bytes: int
    fetch_s: float
    """Time that its fetch took."""
    uses: int
    """Number of workers that it was opened for."""
    last_used_s: float
    pinned: bool


def benefit(candidate: EvictionCandidate, now_s: float) -> float:
    """Seconds of fetching that one byte of this segment is expected to save."""
    idle_s = max(0.0, now_s - candidate.last_used_s)
    likelihood = candidate.uses * math.pow(0.5, min(idle_s / HALF_LIFE_S, 1000.0))
    return max(candidate.fetch_s, 1e-6) * likelihood / max(candidate.size_bytes, 1)


def choose_evictions(
    needed_bytes: int, free_bytes: int, candidates: Iterable[EvictionCandidate], now_s: float
) -> list[CheckpointId] | None:
    """The segments to evict so that `needed_bytes` fit, least benefit first; None if they cannot fit.

    Law: never a pinned one, never one that is not needed, and none at all if it would not help.
    """
    missing = needed_bytes - free_bytes
    chosen: list[EvictionCandidate] = []
    for candidate in sorted(
        (entry for entry in candidates if not entry.pinned),
        key=lambda entry: (benefit(entry, now_s), entry.last_used_s),
    ):
        if missing <= 0:
            break
        chosen.append(candidate)
        missing -= candidate.size_bytes
    if missing > 0:
        return None
    kept = list(chosen)
    for candidate in reversed(chosen):  # a large last one may have made earlier ones needless; spare the best first
        if missing + candidate.size_bytes <= 0:
            kept.remove(candidate)
            missing += candidate.size_bytes
    return [entry.checkpoint for entry in kept]
