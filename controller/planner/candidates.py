"""Candidate generation: every useful way to start, by group size, number of whole workers and nodes (Algorithm 1).

For s stages with w full-memory workers among them, the first w stages go to the fastest nodes with room for the whole
model, the others to the fastest remaining nodes with room for their stage. Generalised: before that, each stage goes
to a node that already holds enough of its layers to be faster than any node that must fetch it. Two variants where
there is a choice: on free devices only, and on any. Never two stages on one node: they would share its link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .checkpoint_layout import Cut
from .latency_model import (
    StageTimes,
    cost_gib_s,
    ready_overlapped_s,
    ready_sequential_s,
    tpot_s,
    ttft_s,
    work,
)
from .node_filter import CandidateNode, Fetch, missing_bytes
from .plan import PlanRequest

SHARING = 2.0
"""Cost factor of memory on a node that has other workers, against a free device: the workers slow each other."""


class Candidate(NamedTuple):
    cuts: tuple[Cut, ...]
    full: int
    """The first so many stages have a whole worker's memory."""
    seats: list[CandidateNode]
    fetches: list[Fetch]
    reserved_bytes: list[int]
    ttft_s: float
    margin: float
    """Factor on `ttft_s` before it is compared with the SLO."""
    tpot_s: float
    whole_s: float
    ready_s: float
    hidden_s: float
    """Time hidden by overlapping: the difference between eq. 1 and eq. 5."""
    cost_gib_s: float
    weight: float
    """Cost including the effect on other workers, by which candidates are compared."""


def _margin(request: PlanRequest, stages: int, fetching: bool) -> float:
    if not fetching:
        return request.margins.warm
    return request.margins.group if stages > 1 else request.margins.alone


class TooFewNodes(NamedTuple):
    """A group size for which there are not enough nodes."""

    stages: int
    full: int
    found: int


class Search:
    """The search for candidates of one request over its nodes at one time. Hot: most of a decision's time is spent
    here."""

    def __init__(self, request: PlanRequest, seats: Sequence[CandidateNode], now_s: float) -> None:
        self._request = request
        self._now_s = now_s
        self._weigh = request.segment_bytes > 0
        free = [seat for seat in seats if not seat.shared]
        self._variants = [free, list(seats)] if free and len(free) < len(seats) else [list(seats)]
        self._any_held = any(seat.held is not None for seat in seats)

    def least_ttft_s(self, size: int) -> float:
        """Lower bound on the TTFT of this group size: every worker whole, each with the fastest node's link."""
        known, seats = self._request.measures, self._variants[-1]
        if not seats:
            return float("inf")
        largest_bytes = (
            0 if self._any_held or not self._weigh else max(c.size_bytes for c in self._request.shape.cuts(size))
        )
        ready_s = max(
            min(seat.state.start_s for seat in seats) + known.library_s.value,
            largest_bytes / max(seat.bytes_per_s for seat in seats),
        )
        return ttft_s(
            ready_s + known.rest_s.value,
            prefill_s=known.prefill_s.value, hop_s=known.hop_s.value, stages=size, work=1.0,
        )  # fmt: skip

    def candidates(self, sizes: Iterable[int]) -> Iterator[Candidate | TooFewNodes]:
        """Yields candidates in order of size and number of whole workers. A single worker has no low-memory variant."""
        for size in sizes:
            cuts = self._request.shape.cuts(size)
            kept = [self._kept(cuts, variant) if self._any_held else [] for variant in self._variants]
            for full in range(0 if size > 1 else 1, size + 1):
                yield from self._of(cuts, full, kept)

    def _of(
        self, cuts: tuple[Cut, ...], full: int, kept: Sequence[list[tuple[float, int, int, int]]]
    ) -> Iterator[Candidate | TooFewNodes]:
        before: list[CandidateNode] | None = None
        for variant, pairs in zip(self._variants, kept, strict=True):
            chosen = self._choose(cuts, full, variant, pairs)
            if isinstance(chosen, TooFewNodes) and pairs:
                chosen = self._choose(cuts, full, variant, [])  # holders took the room of another stage
            if isinstance(chosen, TooFewNodes):
                if variant is self._variants[-1]:
                    yield chosen
            elif chosen != before:
                before = chosen
                yield self._predicted(cuts, full, chosen)

    def _choose(
        self,
        cuts: tuple[Cut, ...],
        full: int,
        seats: Sequence[CandidateNode],
        pairs: Sequence[tuple[float, int, int, int]],
    ) -> list[CandidateNode] | TooFewNodes:
        chosen: dict[int, CandidateNode] = {}
        used: set[int] = set()
        for _, _, stage, place in pairs:
            seat = seats[place]
            if stage not in chosen and place not in used and self._fits(cuts[stage], seat, stage < full):
                chosen[stage] = seat
                used.add(place)
        # Whole workers first, then by size: a node with room for the larger has room for the smaller, none is wasted.
        order = [*range(full), *sorted(range(full, len(cuts)), key=lambda stage: -cuts[stage].size_bytes)]
        for stage in order:
            if stage in chosen:
                continue
            cut = cuts[stage]
            for place, seat in enumerate(seats):
                if (
                    place not in used
                    and self._opens(cut, seat)
                    and (seat.fits_whole or self._fits(cut, seat, stage < full))
                ):
                    chosen[stage] = seat
                    used.add(place)
                    break
            else:
                return TooFewNodes(len(cuts), full, len(chosen))
        return [chosen[stage] for stage in range(len(cuts))]

    def _fits(self, cut: Cut, seat: CandidateNode, full: bool) -> bool:
        if full or seat.fits_whole:
            return seat.fits_whole
        request = self._request
        size_bytes = cut.size_bytes if self._weigh else 0
        need = request.own_bytes(cut, full=False) + missing_bytes(seat.held, cut.layers, size_bytes, request.shape)
        return seat.state.free_bytes >= need

    def _kept(self, cuts: tuple[Cut, ...], seats: Sequence[CandidateNode]) -> list[tuple[float, int, int, int]]:
        """Placements on nodes that hold layers: (fetch seconds, number of stages the node suits, stage, node), best
        first.

        Where layers that are there make a stage quicker than fetching it on the quickest node. Greedy, but a node that
        holds one stage takes it before a node that holds them all.
        """
        pairs: list[tuple[float, int, int]] = []
        uses: Counter[int] = Counter()
        for stage, cut in enumerate(cuts):
            quickest = next((seat for seat in seats if self._opens(cut, seat) and self._fits(cut, seat, False)), None)
            elsewhere_s = quickest.link.fetch_s(cut.size_bytes, self._now_s) if quickest is not None else float("inf")
            for place, seat in enumerate(seats):
                if seat.held is None:
                    continue
                fetch = self._fetch(cut, seat)
                if fetch.seconds < elsewhere_s and self._opens(cut, seat):
                    pairs.append((fetch.seconds, stage, place))
                    uses[place] += 1
        return sorted((seconds, uses[place], stage, place) for seconds, stage, place in pairs)

    def _fetch(self, cut: Cut, seat: CandidateNode) -> Fetch:
        known = seat.fetches.get(cut)
        if known is None:
            known = seat.fetches[cut] = self._fetched(cut, seat)
        return known

    def _fetched(self, cut: Cut, seat: CandidateNode) -> Fetch:
        """The fetch of a stage on a node. Host memory is free, disk and store are read in parallel at their own
        rates."""
        held, size_bytes = seat.held, cut.size_bytes
        if not self._weigh:
            return Fetch(0, 0, 0.0)
        if held is None:
            return Fetch(size_bytes, size_bytes, self._from_store_s(size_bytes, seat))
        missing = cut.layers & ~(held.host | held.coming)
        store_bytes = self._request.shape.size_bytes(missing & ~held.disk)
        lacking_bytes = self._request.shape.size_bytes(missing)
        seconds = max(
            self._from_store_s(store_bytes, seat), (lacking_bytes - store_bytes) / seat.state.disk_bytes_per_s
        )
        if cut.layers & held.coming & ~held.host:
            seconds = max(seconds, seat.coming_s)
        return Fetch(lacking_bytes, store_bytes, seconds)

    def _from_store_s(self, size_bytes: int, seat: CandidateNode) -> float:
        return seat.link.fetch_s(size_bytes, self._now_s) if seat.link.fetches else size_bytes / seat.bytes_per_s

    def _opens(self, cut: Cut, seat: CandidateNode) -> bool:
        """Whether the node's link accepts the stage's fetch without breaking the deadlines of others."""
        return not seat.link.fetches or seat.link.accepts(self._fetch(cut, seat).store_bytes, self._now_s)

    def _predicted(self, cuts: tuple[Cut, ...], full: int, seats: list[CandidateNode]) -> Candidate:
        request, known, stages = self._request, self._request.measures, len(cuts)
        library_s, hop_s = known.library_s.value, known.hop_s.value
        growing = max(1, min(full, request.workers))
        fetches: list[Fetch] = []
        times: list[StageTimes] = []
        reserved: list[int] = []
        weighted = whole_s = own_share = 0.0
        own, fetching = 0, False
        for stage, (cut, seat) in enumerate(zip(cuts, seats, strict=True)):
            fetch = self._fetch(cut, seat)
            load_s = cut.size_bytes / seat.state.device_bytes_per_s if self._weigh else 0.0
            fetching = fetching or fetch.seconds > 0
            if stage < full or not seat.shared:
                own, own_share = own + 1, own_share + cut.share
            fetches.append(fetch)
            times.append(StageTimes(seat.state.start_s, library_s, fetch.seconds, load_s))
            least_bytes = request.own_bytes(cut, full=False) + fetch.missing_bytes
            size_bytes = request.memory_bytes + seat.missing_bytes if stage < full else least_bytes
            if stage < growing:
                whole_s = max(whole_s, (seat.missing_bytes - fetch.missing_bytes) / seat.bytes_per_s)
            reserved.append(size_bytes)
            if seat.shared:
                weighted += size_bytes * SHARING
            else:
                weighted += least_bytes if request.workers <= stage < request.most else size_bytes
        ready_s, unhidden_s = ready_overlapped_s(times), ready_sequential_s(times)
        done = work(stages, own, own_share)
        first_s = ttft_s(
            ready_s + known.rest_s.value, prefill_s=known.prefill_s.value, hop_s=hop_s, stages=stages, work=done
        )
        return Candidate(
            cuts, full, seats, fetches, reserved, first_s, _margin(request, stages, fetching),
            tpot_s(decode_s=known.decode_s.value, hop_s=hop_s, stages=stages, work=done), whole_s, ready_s,
            unhidden_s - ready_s,
            cost_gib_s(sum(reserved), first_s, whole_s), cost_gib_s(weighted, first_s, whole_s),
        )  # fmt: skip
