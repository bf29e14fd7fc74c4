"""Selection of one candidate for a start, with the reason why each other candidate was rejected.

With an SLO, in this order:

1. the cheapest candidate that meets it with a margin for the predictor's own error (HydraServe section 4.1 takes the
   one with the least sharing of devices: here memory on a shared node counts double);
2. the same among groups of more than four workers;
3. the quickest candidate that meets it if the prediction is exact;
4. a postponed start, if it meets the SLO once fetches of others have ended, or is much quicker then;
5. the candidate for a function without an SLO; the plan then says that the SLO is missed.

Without an SLO: the quickest candidate, as long as each step to a dearer one is worth it. A group has memory for as
many whole workers as are requested, if any group does (section 6.1), and for those that later calls may need where
that takes nothing from others: on free devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from .cluster import Cluster
from .links.contention import NEVER, Link
from .plan import CandidateReport, Plan, PlanRequest
from .result import Choice, no_plan, plan_of, postponed
from .search.candidates import Candidate, Search, TooFewNodes
from .search.node_filter import find_candidate_nodes

SIZE_USUAL = 4
"""Usual maximum group size: above it a group gains little and takes many devices (HydraServe section 4.1)."""
SIZE_MOST = 8
WAITS = (0, 1, 3, 7)
"""Pending fetches, by index in the order of their ends, after which a postponed start is evaluated: under load many end
at about the same time."""
PATIENCE = 2.0
"""Maximum postponement of a start for other fetches, in multiples of the SLO. Beyond it, those fetches are not ending
as predicted, for example because the store stalls."""
WORTH = 0.85
"""Maximum TTFT of a dearer candidate, or of a postponed start, relative to the alternative, for it to be chosen."""


class SearchResult(NamedTuple):
    """The candidates of one request at one time, and the choice among them."""

    choice: Choice | None
    candidates: list[Candidate | TooFewNodes]
    links: list[Link]
    """Links of the nodes examined."""
    refused: int
    """Number of nodes with room whose links are committed to other fetches."""


def make_plan(request: PlanRequest, cluster: Cluster, now_s: float) -> Plan:
    """Plans one start. Changes nothing: orders are entered into the cluster with `with_stage` and `Cluster.put`."""
    result = _search(request, cluster, now_s)
    choice = result.choice
    if request.patient and not (choice is not None and choice.meets_slo):
        wait_s = _postponement_s(request, cluster, result, now_s)
        if wait_s is not None:
            return postponed(request, wait_s)
    if choice is None:
        return no_plan(request, cluster, result.candidates, result.refused)
    return plan_of(request, choice, [_report(request, candidate, choice) for candidate in result.candidates])


def _search(request: PlanRequest, cluster: Cluster, now_s: float) -> SearchResult:
    """Searches single workers first, then groups of the usual sizes, then larger groups: each only if needed."""
    sizes = range(1, min(SIZE_USUAL, request.layout.count) + 1)
    nodes, refused = find_candidate_nodes(request, cluster, sizes, now_s)
    peers = cluster.peers(request.checkpoint, now_s)
    search = Search(request, nodes, now_s, peers)
    candidates = list(search.candidates(sizes[:1]))
    choice = _single_worker_choice(request, candidates)
    if choice is None:
        candidates += search.candidates(sizes[1:])
        choice = choose(request, _complete(candidates))
    if choice is not None and not (choice.meets_slo and choice.sure):
        larger = _larger_groups(request, cluster, now_s)
        if larger:
            candidates += larger
            choice = choose(request, _complete(candidates))
    links = [node.link for node in nodes] + [snapshot.link for snapshot in refused] + [peer.up for peer in peers]
    committed = sum(not node.link.accepts(request.segment_bytes, now_s) for node in nodes)
    return SearchResult(choice, candidates, links, len(refused) + committed)


def _complete(candidates: Sequence[Candidate | TooFewNodes]) -> list[Candidate]:
    """The candidates that have a node for each stage."""
    return [candidate for candidate in candidates if isinstance(candidate, Candidate)]


def _single_worker_choice(request: PlanRequest, candidates: Sequence[Candidate | TooFewNodes]) -> Choice | None:
    """The choice of a single worker, if it meets the SLO and does not wait for weights, neither for their fetch nor for
    their way onto a GPU: a group would only cost more."""
    library_s = request.measures.library_s.value
    not_waiting = [
        candidate
        for candidate in _complete(candidates)
        if _meets_slo(request, candidate)
        and candidate.fetches[0].seconds <= candidate.nodes[0].state.start_s + library_s
        and candidate.load_s <= library_s
    ]
    if not not_waiting or request.workers > 1:
        return None
    cheapest = min(not_waiting, key=_by_cost)
    return Choice(cheapest, "a single worker is started before its weights could be late", True)


def _larger_groups(request: PlanRequest, cluster: Cluster, now_s: float) -> list[Candidate | TooFewNodes]:
    """Candidates of larger groups than usual, of the sizes that could meet the SLO; none if none of them does."""
    sizes = range(SIZE_USUAL + 1, min(SIZE_MOST, request.layout.count) + 1)
    if not sizes:
        return []
    slo_s = request.slo.ttft_s if request.slo is not None and request.slo.ttft_s is not None else NEVER
    nodes, _ = find_candidate_nodes(request, cluster, [1, *sizes], now_s)
    search = Search(request, nodes, now_s, cluster.peers(request.checkpoint, now_s))
    fast_enough = [
        size for size in sizes if search.least_ttft_s(size) * request.margins.group + request.waited_s <= slo_s
    ]
    candidates = list(search.candidates(fast_enough))
    return candidates if any(_meets_slo(request, candidate) for candidate in _complete(candidates)) else []


def choose(request: PlanRequest, candidates: Sequence[Candidate]) -> Choice | None:
    """Chooses a candidate; None if there are none. Fewer missing whole workers come before every other preference."""
    if not candidates:
        return None
    by_missing: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        by_missing.setdefault(_missing_workers(request, candidate), []).append(candidate)
    groups = [by_missing[missing] for missing in sorted(by_missing)]
    if request.slo is None:
        return _quickest_worth_its_cost(groups[0])
    for group in groups:
        meeting = [candidate for candidate in group if _meets_slo(request, candidate)]
        if meeting:
            cheapest = min(meeting, key=_by_cost)
            return Choice(cheapest, f"the cheapest of {len(meeting)} that keep the SLO", True)
    for group in groups:
        meeting = [candidate for candidate in group if _meets_slo(request, candidate, with_margin=False)]
        if meeting:
            quickest = min(meeting, key=_by_ttft)
            return Choice(quickest, "the quickest: none keeps the SLO with its margin", True, sure=False)
    fallback = _quickest_worth_its_cost(groups[0])
    return Choice(fallback.candidate, f"no candidate keeps the SLO: {fallback.reason}", False, sure=False)


def _by_cost(candidate: Candidate) -> tuple[float, float, int]:
    return (candidate.weight, candidate.ttft_s, -candidate.full)


def _by_ttft(candidate: Candidate) -> tuple[float, float, int]:
    return (candidate.ttft_s, candidate.weight, -candidate.full)


def _quickest_worth_its_cost(candidates: Sequence[Candidate]) -> Choice:
    """The cheapest candidate, or a dearer one that is 15% quicker, and so on from that one."""
    cheapest, *dearer = sorted(candidates, key=_by_cost)
    chosen, reason = cheapest, "the cheapest; none of the dearer is 15% quicker"
    for candidate in dearer:
        if candidate.ttft_s <= WORTH * chosen.ttft_s:
            quicker = 1 - candidate.ttft_s / cheapest.ttft_s
            reason = f"{quicker:.0%} quicker than the cheapest, {cheapest.ttft_s:.2f} s"
            chosen = candidate
    return Choice(chosen, reason, True)


def _missing_workers(request: PlanRequest, candidate: Candidate) -> int:
    """Number of requested whole workers that the group has no memory for, and so could not be consolidated into."""
    most = min(request.workers, SIZE_USUAL, request.layout.count)
    return max(0, most - candidate.full)


def _meets_slo(request: PlanRequest, candidate: Candidate, *, with_margin: bool = True) -> bool:
    """True if a candidate meets the SLO, with its error margin or if its prediction is exact."""
    slo = request.slo
    if slo is None:
        return True
    first_s = candidate.ttft_s * candidate.margin if with_margin else candidate.ttft_s
    in_time = slo.ttft_s is None or first_s + request.waited_s <= slo.ttft_s
    return in_time and (slo.tpot_s is None or candidate.tpot_s <= slo.tpot_s)


def _postponement_s(request: PlanRequest, cluster: Cluster, result: SearchResult, now_s: float) -> float | None:
    """Time to postpone a start so that it meets the SLO, or reaches its first token much sooner, once fetches of others
    have ended; None if it should begin now.

    Departure: the paper starts a single worker at once, which is late. It then holds a link for long, and makes those
    late that come after it.
    """
    if request.slo is None or request.slo.ttft_s is None:
        return None
    until_s = now_s + PATIENCE * request.slo.ttft_s - request.waited_s
    ends_s = sorted({end_s for link in result.links for end_s in link.ends_s(now_s) if end_s <= until_s})
    best_ttft_s = result.choice.candidate.ttft_s * WORTH if result.choice is not None else NEVER
    best_wait_s: float | None = None
    for index in WAITS:
        if index >= len(ends_s):
            break
        wait_s = ends_s[index] - now_s
        later = _search(replace(request, waited_s=request.waited_s + wait_s), cluster, ends_s[index]).choice
        if later is None:
            continue
        if later.meets_slo:
            return wait_s
        if wait_s + later.candidate.ttft_s < best_ttft_s:
            best_ttft_s, best_wait_s = wait_s + later.candidate.ttft_s, wait_s
    return best_wait_s


def _report(request: PlanRequest, candidate: Candidate | TooFewNodes, choice: Choice) -> CandidateReport:
    if isinstance(candidate, TooFewNodes):
        why = f"{candidate.stages} nodes with room are needed, there are {candidate.available}"
        return CandidateReport(stages=candidate.stages, full=candidate.full, nodes=[], why_not=why)
    missing_bytes = store_bytes = peer_bytes = 0
    for fetch in candidate.fetches:
        missing_bytes += fetch.missing_bytes
        store_bytes += fetch.store_bytes
        peer_bytes += fetch.peer_bytes
    return CandidateReport(
        stages=len(candidate.cuts),
        full=candidate.full,
        nodes=[node.state.node for node in candidate.nodes],
        missing_bytes=missing_bytes,
        store_bytes=store_bytes,
        peer_bytes=peer_bytes,
        ttft_s=candidate.ttft_s,
        margin=candidate.margin,
        tpot_s=candidate.tpot_s,
        cost_gib_s=candidate.cost_gib_s,
        why_not="" if candidate is choice.candidate else _why_rejected(request, candidate, choice),
    )


def _why_rejected(request: PlanRequest, candidate: Candidate, choice: Choice) -> str:
    slo, chosen = request.slo, choice.candidate
    margin = candidate.margin if choice.sure else 1.0
    if slo is not None and slo.ttft_s is not None and candidate.ttft_s * margin + request.waited_s > slo.ttft_s:
        times = f" × {margin:.2f}" if margin > 1 else ""
        waited = f" after {request.waited_s:.2f} s of waiting" if request.waited_s else ""
        return f"TTFT {candidate.ttft_s:.2f} s{times}{waited} is above {slo.ttft_s:g} s"
    if slo is not None and slo.tpot_s is not None and candidate.tpot_s > slo.tpot_s:
        return f"TPOT {candidate.tpot_s:.3f} s is above {slo.tpot_s:g} s"
    if _missing_workers(request, candidate) > _missing_workers(request, chosen):
        return f"has memory for {candidate.full} whole workers, the one taken for {chosen.full}"
    if candidate.weight > chosen.weight or (slo is not None and choice.sure):
        quicker = "" if slo is not None else f", and not 15% quicker than {chosen.ttft_s:.2f} s"
        return f"dearer: {candidate.weight:.1f} GiB·s against {chosen.weight:.1f}{quicker}"
    return f"slower: {candidate.ttft_s:.2f} s against {chosen.ttft_s:.2f} s"
