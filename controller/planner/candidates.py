"""Every way to start that is worth a look: sizes of group, whole workers in it, and on which nodes (Algorithm 1).

For s stages with w full-memory workers among them, the first w stages go to the quickest nodes with room for the whole
model, the others to the quickest that are left with room for their stage. Generalised: before that, each stage goes
where enough of its layers lie already to make it quicker than any node that must fetch it. Two variants where there is
a choice: on free devices only, and on any. Never two stages on one node: they would share its link and gain nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fleetstart.controller.planner.cluster import Cluster
from fleetstart.controller.planner.measures import VersionMeasures
from fleetstart.controller.planner.nodes import Held, NodeState
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
    slo: SLO | None = None
    waited_s: float = 0.0
    """How long its oldest call has waited already."""
    workers: int = 1
    """Whole workers that are wanted of this start in the end."""
    overlapped: bool = True
    """False predicts a start without worker-level overlapping (eq. 1): benchmarks compare with it."""

    @property
    def segment_bytes(self) -> int:
        return self.shape.total_bytes if self.checkpoint is not None else 0

    def own_bytes(self, cut: Cut, *, full: bool) -> int:
        """A low-memory worker does without the KV cache of the layers that others have."""
        return self.memory_bytes if full else self.memory_bytes - round(self.kv_bytes * (1 - cut.share))


class Seat:
    """A node as this request meets it now."""

    __slots__ = ("bytes_per_s", "fits_whole", "held", "missing_bytes", "opened", "ratio", "shared", "state")

    def __init__(self, state: NodeState, request: PlanRequest, now_s: float) -> None:
        link = state.link
        self.state = state
        self.bytes_per_s = link.share(now_s) if link.fetches else link.bytes_per_s
        self.ratio = 1 / self.bytes_per_s + 1 / state.device_bytes_per_s
        self.opened = not link.fetches or link.accepts(now_s)
        self.shared = state.workers > 0
        self.held = state.held.get(request.checkpoint) if request.checkpoint is not None else None
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
    seats: tuple[Seat, ...]
    fetches: tuple[Fetch, ...]
    reserved_bytes: tuple[int, ...]
    ttft_s: float
    tpot_s: float
    whole_s: float
    cost_gib_s: float
    weight: float
    """Cost, with what it takes from others: what is compared."""


class Lack(NamedTuple):
    """A size for which there are not enough nodes."""

    stages: int
    full: int
    found: int


def missing_bytes(held: Held | None, layers: int, size_bytes: int, shape: Shape) -> int:
    """Of these layers, which weigh `size_bytes`: neither in memory there nor on their way."""
    if held is None:
        return size_bytes
    there = (held.host | held.coming) & layers
    return size_bytes - (shape.size_bytes(there) if there else 0) if there != layers else 0


def find_seats(request: PlanRequest, cluster: Cluster, sizes: Sequence[int], now_s: float) -> tuple[list[Seat], int]:
    """The nodes that these sizes could want, quickest first; and how many more were bound by their promises."""
    needs = {request.memory_bytes + request.segment_bytes}
    for size in sizes:
        cuts = request.shape.cuts(size)
        needs.add(
            min(request.own_bytes(cut, full=False) + (cut.size_bytes if request.segment_bytes else 0) for cut in cuts)
        )
    states, refused = cluster.quickest(sorted(needs, reverse=True), max(sizes), now_s)
    known = {state.node for state in states}
    states += [state for state in cluster.holders(request.checkpoint) if state.node not in known]
    seats = [Seat(state, request, now_s) for state in states]
    seats.sort(key=lambda seat: (seat.ratio, seat.state.node))
    return seats, refused


def candidates(
    request: PlanRequest, seats: Sequence[Seat], sizes: Iterable[int], now_s: float
) -> Iterator[Candidate | Lack]:
    """In rising size and number of whole workers. A single worker has all memory, so it has no low-memory variant."""
    variants = [list(seats)]
    free = [seat for seat in seats if not seat.shared]
    if free and len(free) < len(seats):
        variants.insert(0, free)
    for size in sizes:
        cuts = request.shape.cuts(size)
        for full in range(0 if size > 1 else 1, size + 1):
            before: tuple[Seat, ...] = ()
            for variant in variants:
                chosen = _choose(request, cuts, full, variant, now_s)
                if isinstance(chosen, Lack):
                    if variant is variants[-1]:
                        yield chosen
                elif chosen != before:
                    before = chosen
                    yield _predicted(request, cuts, full, chosen, now_s)


def _choose(
    request: PlanRequest, cuts: tuple[Cut, ...], full: int, seats: Sequence[Seat], now_s: float
) -> tuple[Seat, ...] | Lack:
    chosen: dict[int, Seat] = {}
    used: set[int] = set()
    if any(seat.held for seat in seats):
        for _, stage, place in _kept(request, cuts, seats, now_s):
            seat = seats[place]
            if stage not in chosen and place not in used and _fits(request, cuts[stage], seat, stage < full):
                chosen[stage] = seat
                used.add(place)
    for stage, cut in enumerate(cuts):
        if stage in chosen:
            continue
        for place, seat in enumerate(seats):
            if place not in used and seat.opened and _fits(request, cut, seat, stage < full):
                chosen[stage] = seat
                used.add(place)
                break
        else:
            return Lack(len(cuts), full, len(chosen))
    return tuple(chosen[stage] for stage in range(len(cuts)))


def _fits(request: PlanRequest, cut: Cut, seat: Seat, full: bool) -> bool:
    if full or seat.fits_whole:
        return seat.fits_whole
    size_bytes = cut.size_bytes if request.segment_bytes else 0
    need = request.own_bytes(cut, full=False) + missing_bytes(seat.held, cut.layers, size_bytes, request.shape)
    return seat.state.free_bytes >= need


def _kept(
    request: PlanRequest, cuts: tuple[Cut, ...], seats: Sequence[Seat], now_s: float
) -> list[tuple[float, int, int]]:
    """(seconds saved, negative, so that the most comes first; stage; seat) where layers that are there pay."""
    pairs: list[tuple[float, int, int]] = []
    plain = next((seat for seat in seats if seat.opened and seat.held is None), None)
    for stage, cut in enumerate(cuts):
        elsewhere_s = cut.size_bytes / plain.bytes_per_s if plain is not None else float("inf")
        for place, seat in enumerate(seats):
            if seat.held is None:
                continue
            fetch = _fetch(request, cut, seat, now_s)
            if fetch.seconds < elsewhere_s and (seat.opened or not fetch.store_bytes):
                pairs.append((fetch.seconds - min(elsewhere_s, cut.size_bytes / seat.bytes_per_s), stage, place))
    return sorted(pairs)


def _fetch(request: PlanRequest, cut: Cut, seat: Seat, now_s: float) -> Fetch:
    """Host memory costs nothing, disk its own rate, the store the share of the link that is left; in parallel."""
    held = seat.held
    if not request.segment_bytes:
        return Fetch(0, 0, 0.0)
    if held is None:
        return Fetch(cut.size_bytes, cut.size_bytes, cut.size_bytes / seat.bytes_per_s)
    assert request.checkpoint is not None
    missing = cut.layers & ~(held.host | held.coming)
    from_store = missing & ~held.disk
    store_bytes = request.shape.size_bytes(from_store) if from_store else 0
    lacking_bytes = request.shape.size_bytes(missing) if missing else 0
    seconds = max(store_bytes / seat.bytes_per_s, (lacking_bytes - store_bytes) / seat.state.disk_bytes_per_s)
    if cut.layers & held.coming & ~held.host:
        seconds = max(seconds, seat.state.link.pending_s(request.checkpoint, now_s))
    return Fetch(lacking_bytes, store_bytes, seconds)


def _predicted(
    request: PlanRequest, cuts: tuple[Cut, ...], full: int, seats: tuple[Seat, ...], now_s: float
) -> Candidate:
    known, stages, loaded = request.measures, len(cuts), request.segment_bytes > 0
    fetches = tuple(_fetch(request, cut, seat, now_s) for cut, seat in zip(cuts, seats, strict=True))
    times = [
        StageTimes(
            seat.state.start_s,
            known.library_s.value,
            fetch.seconds,
            cut.size_bytes / seat.state.device_bytes_per_s if loaded else 0.0,
        )
        for cut, seat, fetch in zip(cuts, seats, fetches, strict=True)
    ]
    ready_s = (ready_overlapped_s if request.overlapped else ready_sequential_s)(times) + known.rest_s.value
    done = work(stages, [cut.share for cut in cuts[:full]])
    hop_s = known.hop_s.value
    first_s = ttft_s(ready_s, prefill_s=known.prefill_s.value, hop_s=hop_s, stages=stages, work=done)
    each_s = tpot_s(decode_s=known.decode_s.value, hop_s=hop_s, stages=stages, work=done)
    growing = max(1, min(full, request.workers))
    whole_s = max(
        (max(0, seat.missing_bytes - fetch.missing_bytes) / seat.bytes_per_s if stages > 1 else 0.0)
        for seat, fetch in zip(seats[:growing], fetches, strict=False)
    )
    reserved = tuple(
        request.own_bytes(cut, full=stage < full) + (seat.missing_bytes if stage < full else fetch.missing_bytes)
        for stage, (cut, seat, fetch) in enumerate(zip(cuts, seats, fetches, strict=True))
    )
    weighted = sum(size * (SHARING if seat.shared else 1.0) for size, seat in zip(reserved, seats, strict=True))
    return Candidate(
        cuts, full, seats, fetches, reserved, first_s, each_s, whole_s,
        cost_gib_s(sum(reserved), first_s, whole_s), cost_gib_s(weighted, first_s, whole_s),
    )  # fmt: skip
