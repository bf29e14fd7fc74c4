"""Results of planning: a choice as a plan with its stages and deadlines, a postponed start, or the error if none
fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.sizes import MIB

from .candidates import Candidate, TooFewNodes
from .cluster import Cluster
from .constraints import admits, unmet_constraint
from .contention import NEVER
from .plan import CandidateReport, Plan, PlanRequest, StagePlan


class Choice(NamedTuple):
    """The candidate that was taken, and the reason."""

    taken: Candidate
    reason: str
    meets_slo: bool
    sure: bool = True
    """Whether it meets the SLO with its error margin."""


def plan_of(request: PlanRequest, choice: Choice, considered: list[CandidateReport]) -> Plan:
    taken = choice.taken
    return Plan(
        stages=_stages(request, choice),
        regions=list(request.wanted.regions),
        isolation=request.wanted.isolation,
        ttft_s=taken.ttft_s,
        margin=taken.margin,
        ready_s=taken.ready_s,
        sequential_ttft_s=taken.ttft_s + taken.hidden_s,
        tpot_s=taken.tpot_s,
        cost_gib_s=taken.cost_gib_s,
        whole_s=taken.whole_s,
        meets_slo=choice.meets_slo,
        reason=choice.reason,
        considered=considered,
    )


def _stages(request: PlanRequest, choice: Choice) -> list[StagePlan]:
    taken = choice.taken
    within_s = _fetch_within_s(request, choice)
    return [
        StagePlan(
            node=seat.state.node,
            region=seat.state.region,
            epoch=seat.state.epoch,
            first=cut.first,
            end=cut.end,
            full=stage < taken.full,
            memory_bytes=request.own_bytes(cut, full=stage < taken.full),
            reserved_bytes=reserved,
            missing_bytes=fetch.missing_bytes,
            store_bytes=fetch.store_bytes,
            fetch_s=fetch.seconds,
            fetch_within_s=within_s if within_s < NEVER else None,
        )
        for stage, (cut, seat, fetch, reserved) in enumerate(
            zip(taken.cuts, taken.seats, taken.fetches, taken.reserved_bytes, strict=True)
        )
    ]


def _fetch_within_s(request: PlanRequest, choice: Choice) -> float:
    """Deadline of a stage's fetch after its order, so that the promised TTFT is kept (D_i of eq. 3)."""
    slo, taken = request.slo, choice.taken
    if slo is None or slo.ttft_s is None or not choice.meets_slo:
        return NEVER
    first_within_s = (slo.ttft_s - request.waited_s) / (taken.margin if choice.sure else 1.0)
    return first_within_s - (taken.ttft_s - taken.ready_s)


def postponed(request: PlanRequest, wait_s: float) -> Plan:
    error = Unavailable(
        f"function {request.function}: its start is postponed by {wait_s:.2f} s, until other cold starts have fetched",
        retry_after_s=1,
    )
    return Plan(stages=[], meets_slo=False, reason=error.message, wait_s=wait_s, error=error.info())


def no_plan(request: PlanRequest, cluster: Cluster, found: Sequence[Candidate | TooFewNodes], refused: int) -> Plan:
    why = unmet_constraint(request.wanted, cluster)
    need_mib = (request.memory_bytes + request.segment_bytes) // MIB
    if refused:
        error = Unavailable(
            f"function {request.function}: {refused} nodes have room, but promised their links to other cold starts",
            hint="it is tried again as fetches end; add nodes, or relax the SLOs of the functions that start now",
            retry_after_s=1,
        )
    elif not len(cluster):
        error = Unavailable(
            f"function {request.function}: no node is alive",
            hint="`fs status` lists nodes; `fs up` starts one here",
            retry_after_s=2,
        )
    elif why[0]:
        error = Unavailable(f"function {request.function}: {why[0]}", hint=why[1], retry_after_s=5)
    else:
        fitting = [state for state in cluster if admits(request.wanted, state)]
        regions = request.wanted.regions
        there = f" in {', '.join(regions)}" if regions else ""
        roomiest = min(fitting, key=lambda state: (-state.free_bytes, state.node))
        error = Unavailable(
            f"function {request.function}: a worker needs {need_mib} MiB, the roomiest node{there} {roomiest.node} has "
            f"{max(0, roomiest.free_bytes) // MIB} of {roomiest.memory_bytes // MIB} MiB free",
            hint="stop or shrink other functions, or lower `memory`",
            retry_after_s=5,
        )
    return Plan(
        stages=[],
        meets_slo=False,
        reason=error.message,
        regions=list(request.wanted.regions),
        isolation=request.wanted.isolation,
        considered=[
            CandidateReport(stages=one.stages, full=one.full, nodes=[], why_not=f"{one.found} nodes have room")
            for one in found
            if isinstance(one, TooFewNodes)
        ],
        error=error.info(),
    )
