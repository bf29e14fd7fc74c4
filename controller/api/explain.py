"""Why an invocation's worker was started as it was, beside what came of it: a trace and a plan in, an answer out."""

from __future__ import annotations

from fleetstart.runtime.contract.billing.ledger import InvocationTrace
from fleetstart.runtime.contract.timeline import PhaseName, Timeline

from ..planner import Plan
from ..planner.latency_model import cost_gib_s
from ..planner.report import ObservedStart, explain
from ..schemas.functions import Prediction
from ..schemas.planning import InvocationPlan

LEAST_EVENTS = 5
"""Of a stream, for the time between its tokens: fewer are mostly its first and its last."""


def invocation_plan(
    trace: InvocationTrace, plan: Plan, *, is_llm: bool, prediction: Prediction | None
) -> InvocationPlan:
    row = trace.row
    first_s = _first_byte_s(trace.timeline)
    decided_s = (plan.decided_unix_ms - row.accepted_unix_ms) / 1000
    outcome = ObservedStart()
    if row.start != "hot" and first_s is not None and plan.decided_unix_ms:
        ttft_s = max(0.0, first_s - decided_s)
        tpot_s = _token_s(trace) if is_llm else None
        outcome = ObservedStart(ttft_s=ttft_s, tpot_s=tpot_s, cost_gib_s=_cost_gib_s(plan, ttft_s))
    return InvocationPlan(
        row=row,
        explanation=explain(plan, outcome),
        ttft_s=first_s,
        decided_s=decided_s,
        prediction=prediction,
        relayed=trace.relayed,
    )


def _first_byte_s(timeline: Timeline) -> float | None:
    """None if it had no answer of a worker's."""
    accepted_ns, answered_ns = _begin_ns(timeline, "queue"), _end_ns(timeline, "execute")
    return None if accepted_ns is None or answered_ns is None else (answered_ns - accepted_ns) / 1e9


def _token_s(trace: InvocationTrace) -> float | None:
    """Of a stream of tokens: one an event, and an opening or a closing one besides."""
    begun_ns, ended_ns = _begin_ns(trace.timeline, "respond"), _end_ns(trace.timeline, "respond")
    if begun_ns is None or ended_ns is None or trace.events < LEAST_EVENTS:
        return None
    return (ended_ns - begun_ns) / 1e9 / (trace.events - 3)


def _cost_gib_s(plan: Plan, ttft_s: float) -> float | None:
    """Memory held until the first token, or until a pipeline was one worker; None while it is not."""
    reserved_bytes = sum(stage.reserved_bytes for stage in plan.stages)
    if len(plan.stages) == 1:
        return cost_gib_s(reserved_bytes, ttft_s, 0.0)
    if not plan.whole_unix_ms:
        return None
    return cost_gib_s(reserved_bytes, ttft_s, max(0.0, (plan.whole_unix_ms - plan.decided_unix_ms) / 1000 - ttft_s))


def _begin_ns(timeline: Timeline, name: PhaseName) -> int | None:
    return min((phase.started_ns for phase in timeline.phases if phase.name == name), default=None)


def _end_ns(timeline: Timeline, name: PhaseName) -> int | None:
    return max((phase.ended_ns for phase in timeline.phases if phase.name == name), default=None)
