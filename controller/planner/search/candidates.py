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

from fleetstart.runtime.contract.node.devices import DeviceShare, host_bytes

from ..checkpoint_layout import Cut
from ..latency_model import (
    StageTimes,
    StageWork,
    cost_gib_s,
    ready_overlapped_s,
    ready_sequential_s,
    tpot_s,
    ttft_s,
    work,
)
from ..peers import Fetch, PeerSource
from ..plan import PlanRequest
from .fetches import FetchPredictor
from .node_filter import CandidateNode, missing_bytes

WARM_MOST = 8
"""Maximum number of stages of a group that is cut where nodes' layers end: that of the largest groups."""
SHARING = 2.0
"""Cost factor of memory on a node that has other workers, against a free device: the workers slow each other."""


class Candidate(NamedTuple):
    """A way to start: a node, a fetch and a reservation for each stage, with predictions."""

    cuts: tuple[Cut, ...]
    full: int
    """The first so many stages have a whole worker's memory."""
    nodes: list[CandidateNode]
    fetches: list[Fetch]
    reserved_bytes: list[int]
    devices: list[tuple[DeviceShare, ...]]
    ttft_s: float
    margin: float
    """Factor on `ttft_s` before it is compared with the SLO."""
    tpot_s: float
    whole_s: float
    ready_s: float
    load_s: float
    """The longest that a stage's weights take from host memory onto a GPU."""
    hidden_s: float
    """Time hidden by overlapping: the difference between eq. 1 and eq. 5."""
    cost_gib_s: float
    weight: float
    """Cost including the effect on other workers, by which candidates are compared."""


class TooFewNodes(NamedTuple):
    """A group size for which there are not enough nodes."""

    stages: int
    full: int
    available: int


class HolderPlacement(NamedTuple):
    """The placement of a stage on a node that holds layers of it; sorted, the best comes first."""

    fetch_s: float
    stages_suited: int
    """Number of stages that the node suits: a node that holds one stage gets it before a node that holds them all."""
    stage: int
    node_index: int


class Search:
    """The search for candidates of one request over its nodes at one time. Hot: most of a decision's time is spent
    here."""

    def __init__(
        self, request: PlanRequest, nodes: Sequence[CandidateNode], now_s: float, peers: Sequence[PeerSource] = ()
    ) -> None:
        """`peers`: what nodes have of the checkpoint for others."""
        self._request = request
        self._fetches = FetchPredictor(request, peers, now_s)
        self._any_peer = bool(peers)
        self._own_bytes: dict[int, int] = {}
        """Cached memory of stages on nodes without a GPU, by their layers."""
        self._now_s = now_s
        self._has_weights = request.segment_bytes > 0
        free = [node for node in nodes if not node.shared]
        self._variants = [free, list(nodes)] if free and len(free) < len(nodes) else [list(nodes)]
        self._any_held = any(node.held is not None for node in nodes)

    def least_ttft_s(self, size: int) -> float:
        """Lower bound on the TTFT of this group size: every worker whole, each with the fastest node's link."""
        measures, nodes = self._request.measures, self._variants[-1]
        if not nodes:
            return float("inf")
        largest_bytes = 0
        if self._has_weights and not self._any_held:
            largest_bytes = max(cut.size_bytes for cut in self._request.layout.cuts(size))
        ready_s = max(
            min(max(node.state.start_s, node.files_s) for node in nodes) + measures.library_s.value,
            largest_bytes / max(node.state.down_bytes_per_s if self._any_peer else node.bytes_per_s for node in nodes),
        )
        return ttft_s(
            ready_s + measures.rest_s.value,
            prefill_s=measures.prefill_s.value, hop_s=measures.hop_s.value, stages=size,
            work=min([node.least_slowness for node in nodes]),
        )  # fmt: skip

    def candidates(self, sizes: Iterable[int]) -> Iterator[Candidate | TooFewNodes]:
        """Yields candidates in order of size and number of whole workers. A single worker has no low-memory variant."""
        for size in sizes:
            cuts = self._request.layout.cuts(size)
            placements = [self._holder_placements(cuts, nodes) if self._any_held else [] for nodes in self._variants]
            for full in range(0 if size > 1 else 1, size + 1):
                yield from self._variant_candidates(cuts, full, placements)
            if size == 2 and self._any_held:
                yield from self._warm_candidates()

    def _warm_candidates(self) -> Iterator[Candidate | TooFewNodes]:
        """Yields groups that fetch nothing: nodes whose memory together has the model, cut where their layers end
        (λScale section 5). Those that an even cut suits are among the other candidates."""
        layout, nodes = self._request.layout, self._variants[-1]
        warm = [node for node in nodes if node.held is not None and node.held.host and not node.files_s]
        cuts, chosen, first = [], list[CandidateNode](), 0
        while first < layout.count and len(chosen) < WARM_MOST:
            reach, taker = max(
                ((_run_end(node, first, layout.count), node) for node in warm if node not in chosen),
                key=lambda pair: pair[0],
                default=(first, None),
            )
            cut = layout.stage(first, reach) if reach > first else None
            if cut is None or taker is None:
                return
            if not self._fits(cut, taker, False):
                warm.remove(taker)
                continue
            cuts.append(cut)
            chosen.append(taker)
            first = reach
        if first < layout.count or len(chosen) < 2 or tuple(cuts) == layout.cuts(len(cuts)):
            return
        for full in range(len(chosen) + 1):
            if full and not chosen[full - 1].fits_whole:
                break
            yield self._predict(tuple(cuts), full, chosen)

    def _variant_candidates(
        self, cuts: tuple[Cut, ...], full: int, placements: Sequence[list[HolderPlacement]]
    ) -> Iterator[Candidate | TooFewNodes]:
        """Yields one candidate on free devices and one on any, if they differ."""
        previous: list[CandidateNode] | None = None
        for nodes, on_holders in zip(self._variants, placements, strict=True):
            assigned = self._assign(cuts, full, nodes, on_holders)
            if isinstance(assigned, TooFewNodes) and on_holders:
                assigned = self._assign(cuts, full, nodes, [])  # holders took the node that another stage needs
            if isinstance(assigned, TooFewNodes):
                if nodes is self._variants[-1]:
                    yield assigned
            elif assigned != previous:
                previous = assigned
                yield self._predict(cuts, full, assigned)

    def _assign(
        self,
        cuts: tuple[Cut, ...],
        full: int,
        nodes: Sequence[CandidateNode],
        on_holders: Sequence[HolderPlacement],
    ) -> list[CandidateNode] | TooFewNodes:
        """Assigns a node to each stage: holders first, then each remaining stage to the fastest node that fits it."""
        assigned: dict[int, CandidateNode] = {}
        used: set[int] = set()
        for _, _, stage, index in on_holders:
            node = nodes[index]
            if stage not in assigned and index not in used and self._fits(cuts[stage], node, stage < full):
                assigned[stage] = node
                used.add(index)
        # Whole workers first, then by size: a node with room for the larger has room for the smaller, none is wasted.
        order = [*range(full), *sorted(range(full, len(cuts)), key=lambda stage: -cuts[stage].size_bytes)]
        for stage in order:
            if stage in assigned:
                continue
            cut = cuts[stage]
            for index, node in enumerate(nodes):
                if (
                    index not in used
                    and self._fetches.link_accepts(cut, node)
                    and (node.fits_whole or self._fits(cut, node, stage < full))
                ):
                    assigned[stage] = node
                    used.add(index)
                    break
            else:
                return TooFewNodes(len(cuts), full, len(assigned))
        return [assigned[stage] for stage in range(len(cuts))]

    def _fits(self, cut: Cut, node: CandidateNode, full: bool) -> bool:
        """True if the node has memory for the stage, and for a whole worker if it is to become one (`full`)."""
        if full or node.fits_whole:
            return node.fits_whole
        request = self._request
        size_bytes = cut.size_bytes if self._has_weights else 0
        segment_growth = missing_bytes(node.held, cut.layers, size_bytes, request.layout)
        if node.need is not None and node.shares(request.device_bytes(cut)) is None:
            return False
        return node.state.free_bytes >= self._least_bytes(cut, node) + segment_growth

    def _least_bytes(self, cut: Cut, node: CandidateNode) -> int:
        """Memory of a worker that has only this stage, without its weights."""
        if node.need is not None:
            own_bytes = self._request.own_bytes(cut, full=False, kv_on_device=node.has_gpu)
            return host_bytes(own_bytes, node.shares(self._request.device_bytes(cut)) or ())
        known = self._own_bytes.get(cut.layers)
        if node.has_gpu or known is None:
            known = self._request.own_bytes(cut, full=False, kv_on_device=node.has_gpu)
            if not node.has_gpu:
                self._own_bytes[cut.layers] = known
        return known

    def _holder_placements(self, cuts: tuple[Cut, ...], nodes: Sequence[CandidateNode]) -> list[HolderPlacement]:
        """Placements on nodes whose layers make a stage quicker than its fetch on the quickest node, best first.
        Greedy."""
        useful: list[tuple[float, int, int]] = []
        stages_suited: Counter[int] = Counter()
        for stage, cut in enumerate(cuts):
            quickest = next(
                (node for node in nodes if self._fetches.link_accepts(cut, node) and self._fits(cut, node, False)), None
            )
            elsewhere_s = float("inf")
            if quickest is not None:
                fetch_s = quickest.link.fetch_s(cut.size_bytes, self._now_s)
                if self._any_peer and quickest.held is None:
                    fetch_s = self._fetches.of_stage(cut, quickest).seconds
                elsewhere_s = max(fetch_s, quickest.files_s)
            for index, node in enumerate(nodes):
                if node.held is None:
                    continue
                fetch = self._fetches.of_stage(cut, node)
                if max(fetch.seconds, node.files_s) < elsewhere_s and self._fetches.link_accepts(cut, node):
                    useful.append((fetch.seconds, stage, index))
                    stages_suited[index] += 1
        return sorted(HolderPlacement(seconds, stages_suited[index], stage, index) for seconds, stage, index in useful)

    def _predict(self, cuts: tuple[Cut, ...], full: int, nodes: list[CandidateNode]) -> Candidate | TooFewNodes:
        """Predicts times and cost of the group on these nodes."""
        fetches = self._fetches.of_group(cuts, nodes)
        if fetches is None:
            return TooFewNodes(len(cuts), full, 0)
        request, measures, stages = self._request, self._request.measures, len(cuts)
        library_s, hop_s = measures.library_s.value, measures.hop_s.value
        becoming_whole = max(1, min(full, request.workers))
        times: list[StageTimes] = []
        reserved: list[int] = []
        devices: list[tuple[DeviceShare, ...]] = []
        works: list[StageWork] = []
        weighted_bytes = whole_s = onto_gpu_s = 0.0
        fetching = False
        for stage, (cut, node, fetch) in enumerate(zip(cuts, nodes, fetches, strict=True)):
            shares = node.shares(request.device_bytes(request.layout.whole if stage < full else cut)) or ()
            devices.append(shares)
            load_s = cut.size_bytes / node.load_bytes_per_s(shares) if self._has_weights else 0.0
            if node.has_gpu:
                onto_gpu_s = max(onto_gpu_s, load_s)
            fetching = fetching or fetch.seconds > 0 or node.files_s > 0
            works.append(StageWork(cut.share, stage < full or not node.shared, node.slowness(shares)))
            # The process is forked while its files come, and imports them afterwards.
            times.append(StageTimes(max(node.state.start_s, node.files_s), library_s, fetch.seconds, load_s))
            least_bytes = self._least_bytes(cut, node) + fetch.missing_bytes
            whole_bytes = host_bytes(request.memory_bytes, shares) + node.missing_bytes
            size_bytes = whole_bytes if stage < full else least_bytes
            if stage < becoming_whole:
                rest_bytes = node.missing_bytes - fetch.missing_bytes
                # The other stages have the rest by then, and pass it on as fast as peers do.
                per_s = node.bytes_per_s if stages == 1 else node.state.down_bytes_per_s
                whole_s = max(whole_s, rest_bytes / per_s)
            reserved.append(size_bytes)
            if node.shared:
                weighted_bytes += size_bytes * SHARING
            else:
                weighted_bytes += least_bytes if request.workers <= stage < request.most else size_bytes
        ready_s, sequential_s = ready_overlapped_s(times), ready_sequential_s(times)
        token_work = work(works)
        first_s = ttft_s(
            ready_s + measures.rest_s.value,
            prefill_s=measures.prefill_s.value, hop_s=hop_s, stages=stages, work=token_work,
        )  # fmt: skip
        return Candidate(
            cuts=cuts,
            full=full,
            nodes=nodes,
            fetches=fetches,
            reserved_bytes=reserved,
            devices=devices,
            ttft_s=first_s,
            margin=_margin(request, stages, fetching),
            tpot_s=tpot_s(decode_s=measures.decode_s.value, hop_s=hop_s, stages=stages, work=token_work),
            whole_s=whole_s,
            ready_s=ready_s,
            load_s=onto_gpu_s,
            hidden_s=sequential_s - ready_s,
            cost_gib_s=cost_gib_s(sum(reserved), first_s, whole_s),
            weight=cost_gib_s(weighted_bytes, first_s, whole_s),
        )


def _run_end(node: CandidateNode, first: int, count: int) -> int:
    """The end of the node's layers in memory that begin with this one; this one, if it is not there."""
    if node.held is None:
        return first
    above = ~(node.held.host >> first)
    run = (above & -above).bit_length() - 1 if above else count
    return min(count, first + run)


def _margin(request: PlanRequest, stages: int, fetching: bool) -> float:
    if not fetching:
        return request.margins.warm
    return request.margins.group if stages > 1 else request.margins.alone
