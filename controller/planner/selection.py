"""Selection of a candidate, with a reason for each one that is not taken.

With an SLO, the cheapest that keeps it with a margin for the predictor's own error (HydraServe section 4.1 takes the
one with the least sharing of devices: here memory on a shared node counts double); groups of more than four only if
nothing smaller keeps it so; then the quickest that keeps it if the prediction is right; then waiting until others have
fetched, if that keeps it or is much quicker. If nothing does, it is chosen as if there were no SLO, and promised
nothing. Without an SLO, the quickest, as long as each step to a dearer one is worth it. The group has room for as many
whole workers as are wanted, if any does (section 6.1), and for those that may be wanted soon where that takes nothing
from others: on free devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from .candidates import Candidate, Search, TooFewNodes
from .cluster import Cluster
from .contention import NEVER, Link
from .node_filter import find_candidate_nodes
from .plan import CandidateReport, Plan, PlanRequest
from .result import Choice, no_plan, plan_of, postponed

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
"""Maximum TTFT of a dearer candidate relative to a cheaper one, without an SLO."""


class SearchResult(NamedTuple):
    """The candidates found, and the choice among them."""

    choice: Choice | None
    found: list[Candidate | TooFewNodes]
    links: list[Link]
    """Links of the nodes examined."""
    refused: int
    """Number of nodes with room whose links are committed to other fetches."""


def make_plan(request: PlanRequest, cluster: Cluster, now_s: float) -> Plan:
    """Plans one start. Changes nothing: orders are entered into the cluster with `with_stage` and `Cluster.put`."""
    looked = _looked(request, cluster, now_s)
    choice = looked.choice
    if request.patient and not (choice is not None and choice.meets_slo):
        wait_s = _worth_waiting_s(request, cluster, looked, now_s)
        if wait_s is not None:
            return postponed(request, wait_s)
    if choice is None:
        return no_plan(request, cluster, looked.found, looked.refused)
    return plan_of(request, choice, [_considered(request, one, choice) for one in looked.found])


def _looked(request: PlanRequest, cluster: Cluster, now_s: float) -> SearchResult:
    usual = range(1, min(SIZE_USUAL, request.shape.count) + 1)
    seats, refused = find_candidate_nodes(request, cluster, usual, now_s)
    search = Search(request, seats, now_s)
    found = list(search.candidates(usual[:1]))
    choice = _settled(request, found)
    if choice is None:
        found += search.candidates(usual[1:])
        choice = choose(request, [one for one in found if isinstance(one, Candidate)])
    if choice is not None and not (choice.meets_slo and choice.sure):
        more = _wider(request, cluster, now_s)
        if more:
            found += more
            choice = choose(request, [one for one in found if isinstance(one, Candidate)])
    links = [seat.link for seat in seats] + [now.link for now in refused]
    bound = sum(not seat.link.accepts(request.segment_bytes, now_s) for seat in seats)
    return SearchResult(choice, found, links, len(refused) + bound)


def _worth_waiting_s(request: PlanRequest, cluster: Cluster, looked: SearchResult, now_s: float) -> float | None:
    """Time to postpone a start so that it keeps the SLO, or reaches its first token much sooner, once fetches of others
    have ended; None if it should begin now.

    Departure: the paper starts a single worker at once, which is late. It then holds a link for long, and makes those
    late that come after it.
    """
    if request.slo is None or request.slo.ttft_s is None:
        return None
    until_s = now_s + PATIENCE * request.slo.ttft_s - request.waited_s
    ends_s = sorted({end_s for link in looked.links for end_s in link.ends_s(now_s) if end_s <= until_s})
    best_s = looked.choice.taken.ttft_s * WORTH if looked.choice is not None else NEVER
    found_s: float | None = None
    for place in WAITS:
        if place >= len(ends_s):
            break
        wait_s = ends_s[place] - now_s
        then = _looked(replace(request, waited_s=request.waited_s + wait_s), cluster, ends_s[place]).choice
        if then is None:
            continue
        if then.meets_slo:
            return wait_s
        if wait_s + then.taken.ttft_s < best_s:
            best_s, found_s = wait_s + then.taken.ttft_s, wait_s
    return found_s


def _settled(request: PlanRequest, single: Sequence[Candidate | TooFewNodes]) -> Choice | None:
    """The choice of a single worker, if it meets the SLO and does not wait for weights: a group would only cost
    more."""
    hidden = [
        one
        for one in single
        if isinstance(one, Candidate)
        and _meets(request, one)
        and one.fetches[0].seconds <= one.seats[0].state.start_s + request.measures.library_s.value
    ]
    if not hidden or request.workers > 1:
        return None
    best = min(hidden, key=_cheapest)
    return Choice(best, "a single worker is started before its weights could be late", True)


def _wider(request: PlanRequest, cluster: Cluster, now_s: float) -> list[Candidate | TooFewNodes]:
    """Candidates of larger groups than usual, of the sizes that could keep the SLO; none if none of them does."""
    sizes = range(SIZE_USUAL + 1, min(SIZE_MOST, request.shape.count) + 1)
    if not sizes:
        return []
    slo_s = request.slo.ttft_s if request.slo is not None and request.slo.ttft_s is not None else NEVER
    seats, _ = find_candidate_nodes(request, cluster, [1, *sizes], now_s)
    search = Search(request, seats, now_s)
    hopeful = [size for size in sizes if search.least_ttft_s(size) * request.margins.group + request.waited_s <= slo_s]
    found = list(search.candidates(hopeful))
    return found if any(isinstance(one, Candidate) and _meets(request, one) for one in found) else []


def choose(request: PlanRequest, found: Sequence[Candidate]) -> Choice | None:
    if not found:
        return None
    by_lack: dict[int, list[Candidate]] = {}
    for one in found:
        by_lack.setdefault(_lacking(request, one), []).append(one)
    if request.slo is None:
        return _worthwhile(by_lack[min(by_lack)])
    for missing in sorted(by_lack):
        keeping = [one for one in by_lack[missing] if _meets(request, one)]
        if keeping:
            best = min(keeping, key=_cheapest)
            return Choice(best, f"the cheapest of {len(keeping)} that keep the SLO", True)
    for missing in sorted(by_lack):
        hopeful = [one for one in by_lack[missing] if _meets(request, one, bare=True)]
        if hopeful:
            best = min(hopeful, key=lambda one: (one.ttft_s, one.weight, -one.full))
            return Choice(best, "the quickest: none keeps the SLO with its margin", True, sure=False)
    without = _worthwhile(by_lack[min(by_lack)])
    return Choice(without.taken, f"no candidate keeps the SLO: {without.reason}", False, sure=False)


def _cheapest(one: Candidate) -> tuple[float, float, int]:
    return (one.weight, one.ttft_s, -one.full)


def _worthwhile(found: Sequence[Candidate]) -> Choice:
    order = sorted(found, key=_cheapest)
    taken, reason = order[0], "the cheapest; none of the dearer is 15% quicker"
    for one in order[1:]:
        if one.ttft_s <= WORTH * taken.ttft_s:
            reason = f"{1 - one.ttft_s / order[0].ttft_s:.0%} quicker than the cheapest, {order[0].ttft_s:.2f} s"
            taken = one
    return Choice(taken, reason, True)


def _lacking(request: PlanRequest, one: Candidate) -> int:
    """Number of requested whole workers that the group has no memory for, and so could not be consolidated into."""
    most = min(request.workers, SIZE_USUAL, request.shape.count)
    return max(0, most - one.full)


def _meets(request: PlanRequest, one: Candidate, *, bare: bool = False) -> bool:
    """Whether a candidate meets the SLO, with its error margin or (`bare`) without."""
    slo = request.slo
    if slo is None:
        return True
    first_s = one.ttft_s if bare else one.ttft_s * one.margin
    in_time = slo.ttft_s is None or first_s + request.waited_s <= slo.ttft_s
    return in_time and (slo.tpot_s is None or one.tpot_s <= slo.tpot_s)


def _considered(request: PlanRequest, one: Candidate | TooFewNodes, choice: Choice) -> CandidateReport:
    if isinstance(one, TooFewNodes):
        why = f"{one.stages} nodes with room are needed, there are {one.found}"
        return CandidateReport(stages=one.stages, full=one.full, nodes=[], why_not=why)
    return CandidateReport(
        stages=len(one.cuts),
        full=one.full,
        nodes=[seat.state.node for seat in one.seats],
        ttft_s=one.ttft_s,
        margin=one.margin,
        tpot_s=one.tpot_s,
        cost_gib_s=one.cost_gib_s,
        why_not="" if one is choice.taken else _why_not(request, one, choice),
    )


def _why_not(request: PlanRequest, one: Candidate, choice: Choice) -> str:
    slo, taken = request.slo, choice.taken
    margin = one.margin if choice.sure else 1.0
    if slo is not None and slo.ttft_s is not None and one.ttft_s * margin + request.waited_s > slo.ttft_s:
        times = f" × {margin:.2f}" if margin > 1 else ""
        waited = f" after {request.waited_s:.2f} s of waiting" if request.waited_s else ""
        return f"TTFT {one.ttft_s:.2f} s{times}{waited} is above {slo.ttft_s:g} s"
    if slo is not None and slo.tpot_s is not None and one.tpot_s > slo.tpot_s:
        return f"TPOT {one.tpot_s:.3f} s is above {slo.tpot_s:g} s"
    lacking, wanted = _lacking(request, one), _lacking(request, taken)
    if lacking > wanted:
        return f"has memory for {one.full} whole workers, the one taken for {taken.full}"
    if one.weight > taken.weight or (slo is not None and choice.sure):
        quicker = "" if slo is not None else f", and not 15% quicker than {taken.ttft_s:.2f} s"
        return f"dearer: {one.weight:.1f} GiB·s against {taken.weight:.1f}{quicker}"
    return f"slower: {one.ttft_s:.2f} s against {taken.ttft_s:.2f} s"
