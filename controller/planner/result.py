"""Results of planning: a choice as a plan with its stages and deadlines, a postponed start, or the error if none
fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.sizes import MIB

from .cluster import Cluster
from .constraints import admits, unmet_constraint
from .devices import choose_devices, free_in_words, wanted_in_words
from .links.contention import NEVER
from .node_state import NodeState
from .plan import CandidateReport, Plan, PlanRequest, StagePlan
from .search.candidates import Candidate, TooFewNodes


class Choice(NamedTuple):
    """The chosen candidate, and the reason."""

    candidate: Candidate
    reason: str
    meets_slo: bool
    sure: bool = True
    """True if it meets the SLO with its error margin."""


def plan_of(request: PlanRequest, choice: Choice, considered: list[CandidateReport]) -> Plan:
    chosen = choice.candidate
    return Plan(
        stages=_stages(request, choice),
        regions=list(request.wanted.regions),
        isolation=request.wanted.isolation,
        ttft_s=chosen.ttft_s,
        margin=chosen.margin,
        ready_s=chosen.ready_s,
        sequential_ttft_s=chosen.ttft_s + chosen.hidden_s,
        tpot_s=chosen.tpot_s,
        cost_gib_s=chosen.cost_gib_s,
        whole_s=chosen.whole_s,
        meets_slo=choice.meets_slo,
        reason=choice.reason,
        considered=considered,
    )


def _stages(request: PlanRequest, choice: Choice) -> list[StagePlan]:
    chosen = choice.candidate
    within_s = _fetch_within_s(request, choice)
    return [
        StagePlan(
            node=node.state.node,
            region=node.state.region,
            epoch=node.state.epoch,
            first=cut.first,
            end=cut.end,
            full=stage < chosen.full,
            devices=devices,
            memory_bytes=request.own_bytes(cut, full=stage < chosen.full, kv_on_device=node.has_gpu),
            reserved_bytes=reserved,
            missing_bytes=fetch.missing_bytes,
            store_bytes=fetch.store_bytes,
            peers=list(fetch.peers),
            files_bytes=node.files_bytes,
            fetch_s=max(fetch.seconds, node.files_s),
            fetch_within_s=within_s if within_s < NEVER else None,
        )
        for stage, (cut, node, fetch, reserved, devices) in enumerate(
            zip(chosen.cuts, chosen.nodes, chosen.fetches, chosen.reserved_bytes, chosen.devices, strict=True)
        )
    ]


def _fetch_within_s(request: PlanRequest, choice: Choice) -> float:
    """Deadline of a stage's fetch after its order, so that the promised TTFT is kept (D_i of eq. 3)."""
    slo, chosen = request.slo, choice.candidate
    if slo is None or slo.ttft_s is None or not choice.meets_slo:
        return NEVER
    first_within_s = (slo.ttft_s - request.waited_s) / (chosen.margin if choice.sure else 1.0)
    return first_within_s - (chosen.ttft_s - chosen.ready_s)


def postponed(request: PlanRequest, wait_s: float) -> Plan:
    error = Unavailable(
        f"function {request.function}: its start is postponed by {wait_s:.2f} s, until other cold starts have fetched",
        retry_after_s=1,
    )
    return Plan(stages=[], meets_slo=False, reason=error.message, wait_s=wait_s, error=error.info())


def _devices_are_free(request: PlanRequest, state: NodeState) -> bool:
    need = request.wanted.devices
    least_bytes = min(request.device_bytes(cut) for cut in request.layout.cuts(request.layout.count))
    return need is not None and choose_devices(need, state.devices, least_bytes) is not None


def no_plan(
    request: PlanRequest, cluster: Cluster, candidates: Sequence[Candidate | TooFewNodes], refused: int
) -> Plan:
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
    elif request.wanted.devices is not None and not any(_devices_are_free(request, state) for state in cluster):
        need, wants = request.wanted.devices, request.device_bytes(request.layout.whole)
        of_model = f", and the model takes {wants // MIB} MiB of device memory" if wants else ""
        error = Unavailable(
            f"function {request.function}: {wanted_in_words(need)}{of_model}; free are {free_in_words(need, cluster)}",
            hint="it starts once other workers have ended, or on further nodes with such devices (`fs nodes`)",
            retry_after_s=5,
        )
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
            CandidateReport(
                stages=candidate.stages, full=candidate.full, nodes=[], why_not=f"{candidate.available} nodes have room"
            )
            for candidate in candidates
            if isinstance(candidate, TooFewNodes)
        ],
        error=error.info(),
    )
