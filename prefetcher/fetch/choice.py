"""Choice among sources that have the same chunk: who is expected to finish it soonest, by measured rates. Pure.

A source that asks for work leaves alone what the others will have finished before it could, and takes what lies behind.
So a slow one helps with the end of the queue and delays nothing at its front.

The object store is costly: each byte that a disk or a peer has is one that the store need not send. It takes their
chunks only where they are much slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COSTLY_FACTOR = 4.0
"""A costly source takes chunks of others that are slower by this: a start then gains most of its time, and a cluster
that starts one function on many nodes reads the store about once."""
PRIOR_BYTES = 8 * 1024 * 1024
"""Weight of the rate of earlier fetches, in bytes of this one."""
LEAST_BYTES, LEAST_S = 4 * 1024 * 1024, 0.5
"""Fewer bytes in less time measure round trips."""
FIRST_FACTOR = 2.0
"""A source has so many times its patience for its first chunk: a peer may only begin to fetch it itself."""
LATE_FACTOR = 4.0
"""A chunk that takes this times as long as predicted is late."""
PLANNED_PATIENCE_S = 60.0
"""Longest time for the first chunk of a plan's source: it may have to wait for it, as the plan knows."""


@dataclass(frozen=True, slots=True)
class Load:
    """A source's rate, and the bytes that its threads are reading."""

    bytes_per_s: float | None
    """None: it was never measured, and counts as quick as the quickest: so it is tried."""
    under_way_bytes: int = 0
    costly: bool = False


def bytes_to_leave(own: Load, others: Sequence[Load], size_bytes: int) -> float:
    """Bytes at the front of a queue of chunks that all of them have, which a source leaves to the others, before it
    takes `size_bytes`; infinite if it leaves them all. Of any sources, one leaves nothing."""
    rivals = _rivals(own, others)
    if rivals is None:
        return float("inf")
    if not rivals:
        return 0.0
    known = [load.bytes_per_s for load in (own, *rivals) if load.bytes_per_s is not None]
    unknown = max(known, default=1.0)

    def rate(load: Load) -> float:
        return max(unknown if load.bytes_per_s is None else load.bytes_per_s, 1e-9)

    own_s = (own.under_way_bytes + size_bytes) / rate(own)
    soonest_s = min((load.under_way_bytes + size_bytes) / rate(load) for load in rivals)
    return max(0.0, own_s - soonest_s) * sum(map(rate, rivals))


def _rivals(own: Load, others: Sequence[Load]) -> list[Load] | None:
    """Those to compare with; None if a costly source shall leave all to the others."""
    cheap = [load for load in (own, *others) if not load.costly]
    costly = [load for load in (own, *others) if load.costly]
    if not cheap or not costly:
        return list(others)
    joined = None if any(load.bytes_per_s is None for load in cheap) else sum(load.bytes_per_s or 0.0 for load in cheap)
    competing = [load for load in costly if joined is not None and (load.bytes_per_s or 0.0) > COSTLY_FACTOR * joined]
    if own.costly and own not in competing:
        return None
    return [load for load in others if not load.costly or load in competing]


class SourceRate:
    """The rate of one source in one fetch: bytes over the time in which any of its threads was reading."""

    def __init__(self, prior: float | None, patience_s: float) -> None:
        """`prior`: bytes a second in earlier fetches. `patience_s`: time for a chunk before it counts as slow."""
        self._prior = prior
        self._patience_s = FIRST_FACTOR * patience_s
        self._reading = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._size_bytes = 0
        self.delivered: float | None = prior
        """The rate when its last chunk came; None if none has."""

    @property
    def has_delivered(self) -> bool:
        return self._size_bytes > 0

    def begin(self, now_s: float) -> None:
        if self._reading == 0:
            self._since_s = now_s
        self._reading += 1

    def end(self, now_s: float) -> None:
        self._reading -= 1
        if self._reading == 0:
            self._busy_s += now_s - self._since_s

    def add(self, size_bytes: int, now_s: float) -> None:
        self._size_bytes += size_bytes
        self.delivered = self.at(now_s)

    def at(self, now_s: float) -> float | None:
        """Bytes a second; None if it is not known yet."""
        busy_s = max(1e-9, self._busy_s + (now_s - self._since_s if self._reading else 0.0))
        if self._size_bytes < LEAST_BYTES and busy_s < (LEAST_S if self._size_bytes else self._patience_s):
            return self._prior
        if self._prior is None:
            return max(1, self._size_bytes) / busy_s
        return (PRIOR_BYTES + self._size_bytes) / (PRIOR_BYTES / max(self._prior, 1.0) + busy_s)


def is_late(waited_s: float, under_way_bytes: int, delivered: float | None, patience_s: float) -> bool:
    """True if a chunk for which a thread has waited comes much later than its source's rate predicts."""
    predicted_s = under_way_bytes / max(delivered, 1e-9) if delivered is not None else 0.0
    return waited_s > max(patience_s, LATE_FACTOR * predicted_s)


def planned_patience_s(
    patience_s: float, missing_bytes: int, others: Sequence[Load], *, has_delivered: bool, most_s: float
) -> float:
    """Time for a chunk that a plan has from one source, before one of the others reads it.

    A source that has delivered has a pace, which its own waits are part of. Before its first chunk it may rightly wait:
    for as long as the others would need for all that is missing. At that point waiting has cost as much as going to
    them at once would have, so whatever the source does, the fetch takes at most twice as long as without it.
    """
    if has_delivered:
        return patience_s
    rates = [load.bytes_per_s for load in others if load.bytes_per_s]
    if not rates:
        return max(most_s, FIRST_FACTOR * patience_s)
    floor_s = patience_s * (COSTLY_FACTOR if all(load.costly for load in others) else FIRST_FACTOR)
    return max(floor_s, min(most_s, missing_bytes / max(rates)))
