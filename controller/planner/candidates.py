"""Every way to start that is worth a look: sizes of group, whole workers in it, and on which nodes (Algorithm 1).

For s stages with w full-memory workers among them, the first w stages go to the quickest nodes with room for the whole
model, the others to the quickest that are left with room for their stage. Generalised: before that, each stage goes
where enough of its layers lie already to make it quicker than any node that must fetch it. Two variants where there is
a choice: on free devices only, and on any. Never two stages on one node: they would share its link and gain nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fleetstart.controller.planner.cluster import Cluster, Now
from fleetstart.controller.planner.margins import UNKNOWN, Margins
from fleetstart.controller.planner.measures import VersionMeasures
from fleetstart.controller.planner.nodes import Held
from fleetstart.controller.planner.predict import (
    StageTimes,
    cost_gib_s,
    ready_overlapped_s,
    ready_sequential_s,
    tpot_s,
    ttft_s,
    work,
)
from fleetstart.controller.planner.shape import EVERY_LAYER, Cut, Shape
from fleetstart.controller.planner.where import ANYWHERE, Wanted
from fleetstart.runtime.contract.function import SLO
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName

SHARING = 2.0
"""What a worker's memory counts on a node with others, against one on a free device: it slows them, and they it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """One version that needs workers."""

    function: FunctionName
    shape: Shape
    memory_bytes: int
    """A whole worker's own, weights not counted."""
    checkpoint: CheckpointId | None = None
    kv_bytes: int = 0
    """Part of `memory_bytes` that goes with the layers."""
    measures: VersionMeasures
    margins: Margins = UNKNOWN
    slo: SLO | None = None
    waited_s: float = 0.0
    """How long its oldest call has waited already."""
    patient: bool = True
    """Whether it may wait for links to be free, if that keeps its SLO."""
    workers: int = 1
    """Whole workers that are wanted of this start in the end."""
    most: int = 1
    """That its function may ever have: so many more calls may make of its helpers."""
    wanted: Wanted = ANYWHERE
    """In which it may run; none: anywhere."""

    @property
    def segment_bytes(self) -> int:
        return self.shape.total_bytes if self.checkpoint is not None else 0

    def own_bytes(self, cut: Cut, *, full: bool) -> int:
        """A low-memory worker does without the KV cache of the layers that others have."""
        return self.memory_bytes if full else self.memory_bytes - round(self.kv_bytes * (1 - cut.share))


class Seat:
    """A node as this request meets it now."""

    __slots__ = (
        "bytes_per_s", "coming_s", "fetches", "fits_whole", "held", "link", "missing_bytes", "ratio", "shared", "state",
    )  # fmt: skip

    def __init__(self, now: Now, request: PlanRequest, now_s: float) -> None:
        state, link = now
        self.state = state
        self.link = link
        self.bytes_per_s = link.bytes_per_s
        self.ratio = (len(link.fetches) + 1) / link.bytes_per_s + 1 / state.device_bytes_per_s
        self.shared = state.workers > 0
        self.held = state.held.get(request.checkpoint) if request.checkpoint is not None else None
        self.coming_s = 0.0
        """Until what is on its way of this checkpoint is there."""
        if self.held is not None and self.held.coming and request.checkpoint is not None:
            self.coming_s = link.pending_s(request.checkpoint, now_s)
        self.fetches: dict[Cut, Fetch] = {}
        """Of each stage that was thought of for it."""
        self.missing_bytes = missing_bytes(self.held, EVERY_LAYER, request.segment_bytes, request.shape)
        self.fits_whole = state.free_bytes >= request.memory_bytes + self.missing_bytes


class Fetch(NamedTuple):
    missing_bytes: int
    store_bytes: int
    seconds: float


class Candidate(NamedTuple):
    cuts: tuple[Cut, ...]
    full: int
    """The first so many stages have a whole worker's memory."""
    seats: list[Seat]
    fetches: list[Fetch]
    reserved_bytes: list[int]
    ttft_s: float
    margin: float
    """What `ttft_s` is multiplied by before it is held to be within the SLO."""
    tpot_s: float
    whole_s: float
    ready_s: float
    hidden_s: float
    """What overlapping hides: the difference between eq. 1 and eq. 5."""
    cost_gib_s: float
    weight: float
    """Cost, with what it takes from others: what is compared."""


def _margin(request: PlanRequest, stages: int, fetching: bool) -> float:
    if not fetching:
        return request.margins.warm
    return request.margins.group if stages > 1 else request.margins.alone


class Lack(NamedTuple):
    """A size for which there are not enough nodes."""

    stages: int
    full: int
    found: int


def missing_bytes(held: Held | None, layers: int, size_bytes: int, shape: Shape) -> int:
    """Of these layers, which weigh `size_bytes`: neither in memory there nor on their way."""
    return size_bytes if held is None or not size_bytes else shape.size_bytes(layers & ~(held.host | held.coming))


def find_seats(
    request: PlanRequest, cluster: Cluster, sizes: Sequence[int], now_s: float
) -> tuple[list[Seat], list[Now]]:
    """The nodes that these sizes could want, quickest first; and those that are bound by their promises."""
    weigh = request.segment_bytes > 0
    needs = {request.memory_bytes + request.segment_bytes}
    for size in sizes:
        needs.update(request.own_bytes(cut, full=False) + cut.size_bytes * weigh for cut in request.shape.cuts(size))
    least_fetch = min(cut.size_bytes for cut in request.shape.cuts(max(sizes))) if weigh else 0
    fetch_bytes = (least_fetch, request.segment_bytes)
    states, refused = cluster.quickest(sorted(needs, reverse=True), fetch_bytes, max(sizes), now_s, request.wanted)
    known = {now.state.node for now in states}
    least_bytes = min(request.own_bytes(cut, full=False) for size in sizes for cut in request.shape.cuts(size))
    holders = cluster.holders(request.checkpoint, least_bytes, now_s, request.wanted)
    seats = [Seat(now, request, now_s) for now in states]
    seats += [Seat(now, request, now_s) for now in holders if now.state.node not in known]
    seats.sort(key=lambda seat: (seat.ratio, seat.state.node))
    return seats, refused


class Search:
    """One request among its seats at one moment. Most of a decision's time is spent here, in small loops."""

    def __init__(self, request: PlanRequest, seats: Sequence[Seat], now_s: float) -> None:
        self._request = request
        self._now_s = now_s
        self._weigh = request.segment_bytes > 0
        free = [seat for seat in seats if not seat.shared]
        self._variants = [free, list(seats)] if free and len(free) < len(seats) else [list(seats)]
        self._any_held = any(seat.held is not None for seat in seats)

    def least_ttft_s(self, size: int) -> float:
        """No candidate of this size can be quicker: every worker whole, the quickest node's link for all."""
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

    def candidates(self, sizes: Iterable[int]) -> Iterator[Candidate | Lack]:
        """In rising size and number of whole workers. A single worker has all memory: it has no low-memory variant."""
        for size in sizes:
            cuts = self._request.shape.cuts(size)
            kept = [self._kept(cuts, variant) if self._any_held else [] for variant in self._variants]
            for full in range(0 if size > 1 else 1, size + 1):
                yield from self._of(cuts, full, kept)

    def _of(
        self, cuts: tuple[Cut, ...], full: int, kept: Sequence[list[tuple[float, int, int, int]]]
    ) -> Iterator[Candidate | Lack]:
        before: list[Seat] | None = None
        for variant, pairs in zip(self._variants, kept, strict=True):
            chosen = self._choose(cuts, full, variant, pairs)
            if isinstance(chosen, Lack) and pairs:
                chosen = self._choose(cuts, full, variant, [])  # what was kept took the room that another stage needs
            if isinstance(chosen, Lack):
                if variant is self._variants[-1]:
                    yield chosen
            elif chosen != before:
                before = chosen
                yield self._predicted(cuts, full, chosen)

    def _choose(
        self, cuts: tuple[Cut, ...], full: int, seats: Sequence[Seat], pairs: Sequence[tuple[float, int, int, int]]
    ) -> list[Seat] | Lack:
        chosen: dict[int, Seat] = {}
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
                return Lack(len(cuts), full, len(chosen))
        return [chosen[stage] for stage in range(len(cuts))]

    def _fits(self, cut: Cut, seat: Seat, full: bool) -> bool:
        if full or seat.fits_whole:
            return seat.fits_whole
        request = self._request
        size_bytes = cut.size_bytes if self._weigh else 0
        need = request.own_bytes(cut, full=False) + missing_bytes(seat.held, cut.layers, size_bytes, request.shape)
        return seat.state.free_bytes >= need

    def _kept(self, cuts: tuple[Cut, ...], seats: Sequence[Seat]) -> list[tuple[float, int, int, int]]:
        """(seconds to fetch, stages that the seat would do for, stage, seat), best first.

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

    def _fetch(self, cut: Cut, seat: Seat) -> Fetch:
        known = seat.fetches.get(cut)
        if known is None:
            known = seat.fetches[cut] = self._fetched(cut, seat)
        return known

    def _fetched(self, cut: Cut, seat: Seat) -> Fetch:
        """Host memory costs nothing, disk its own rate, the store the share of the link that is left; in parallel."""
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

    def _from_store_s(self, size_bytes: int, seat: Seat) -> float:
        return seat.link.fetch_s(size_bytes, self._now_s) if seat.link.fetches else size_bytes / seat.bytes_per_s

    def _opens(self, cut: Cut, seat: Seat) -> bool:
        """Whether its link takes the stage: whether what it must fetch breaks no promise."""
        return not seat.link.fetches or seat.link.accepts(self._fetch(cut, seat).store_bytes, self._now_s)

    def _predicted(self, cuts: tuple[Cut, ...], full: int, seats: list[Seat]) -> Candidate:
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
