"""Contention of cold starts on a node's link: decides if one more fetch would break the deadlines of the others.

HydraServe section 4.2, eq. 3 and 4. All fetches on a link get equal shares. The pending bytes of each are known from
the node's report, and between reports from eq. 4; when one ends, the others get its share. Bytes are those of the
stage, not of the model. Departures: eq. 3 gives every fetch B / (N + 1) to its end, ours also the shares of those that
have ended, so that a small fetch is not refused because of a large one, nor a large one because of many small ones; a
fetch without a promise has no deadline and never blocks others; a deadline that cannot be met even without the newcomer
does not block it, or a stalled store would close the node for good.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from fleetstart.runtime.contract.ids import CheckpointId, WorkerId

NEVER = float("inf")
ROUNDING = 1 + 1e-9
"""Tolerance for the rounding of float sums: a deadline that is met to the last byte is met."""


class PendingFetch(NamedTuple):
    """A fetch in progress, with its deadline."""

    worker: WorkerId
    checkpoint: CheckpointId
    pending_bytes: float
    deadline_s: float = NEVER
    """Deadline on the clock of `now_s`; NEVER if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A node's link to the store, with its fetches as they were at `at_s`."""

    bytes_per_s: float
    at_s: float = 0.0
    fetches: tuple[PendingFetch, ...] = ()

    def at(self, now_s: float) -> Link:
        """The link at a later time, by eq. 4, once for each fetch that ended since: S' = S - B/N x (T - T')."""
        if not self.fetches or now_s <= self.at_s:
            return self
        left, since_s = list(self.fetches), self.at_s
        while left:
            share = self.bytes_per_s / len(left)
            least = min(fetch.pending_bytes for fetch in left)
            step_s = min(least / share, now_s - since_s)
            left = [PendingFetch(fetch[0], fetch[1], fetch[2] - share * step_s, fetch[3]) for fetch in left]
            since_s += step_s
            if since_s >= now_s:
                break
            left = [fetch for fetch in left if fetch.pending_bytes > least * 1e-9]
        fetches = tuple([fetch for fetch in left if fetch.pending_bytes > 0])
        return Link(bytes_per_s=self.bytes_per_s, at_s=now_s, fetches=fetches)

    def accepts(self, size_bytes: float, now_s: float) -> bool:
        """Eq. 3: whether every deadline that can be met now can still be met beside another fetch of that size."""
        link = self.at(now_s)
        return not any(
            link._keeps(fetch, 0.0) and not link._keeps(fetch, size_bytes)
            for fetch in link.fetches
            if fetch.deadline_s < NEVER
        )

    def fetch_s(self, size_bytes: float, now_s: float) -> float:
        """Duration of another fetch of that size beside the others, each with an equal share."""
        if not self.fetches:
            return size_bytes / self.bytes_per_s
        before_bytes = sum([min(fetch.pending_bytes, size_bytes) for fetch in self.at(now_s).fetches])
        return (size_bytes + before_bytes) / self.bytes_per_s

    def pending_s(self, checkpoint: CheckpointId, now_s: float) -> float:
        """Time until the pending bytes of that checkpoint are fetched, if nothing else changes."""
        link = self.at(now_s)
        return max(
            [link._left_s(fetch.pending_bytes) for fetch in link.fetches if fetch.checkpoint == checkpoint], default=0.0
        )

    def ends_s(self, now_s: float) -> list[float]:
        """End time of each fetch, if nothing else changes."""
        link = self.at(now_s)
        return [now_s + link._left_s(fetch.pending_bytes) for fetch in link.fetches]

    def with_fetch(self, fetch: PendingFetch, now_s: float) -> Link:
        link = self.at(now_s)
        return replace(link, at_s=now_s, fetches=(*link.fetches, fetch))

    def _left_s(self, pending_bytes: float) -> float:
        """Remaining time of a fetch: with equal shares it ends when each other has had as many bytes, or has ended."""
        return sum([min(fetch.pending_bytes, pending_bytes) for fetch in self.fetches]) / self.bytes_per_s

    def _keeps(self, fetch: PendingFetch, newcomer_bytes: float) -> bool:
        more_s = min(newcomer_bytes, fetch.pending_bytes) / self.bytes_per_s
        return self._left_s(fetch.pending_bytes) + more_s <= (fetch.deadline_s - self.at_s) * ROUNDING
