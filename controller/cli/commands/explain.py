"""`fs explain`: the placement decision behind an invocation's worker, and its result."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import click

from ...planner.accuracy_report import format_explanation
from ...planner.estimates import CALIBRATING
from ...schemas.planning import InvocationPlan
from .. import output
from ..api_client import ApiClient, find_server
from ..completions import function_names
from ..root import verb
from ..waterfall import second_engine_line, stage_list
from .trace import find_trace


@click.command
@click.argument("which", metavar="INVOCATION|NAME", shell_complete=function_names)
@verb()
@click.pass_obj
def command(home: Path, *, which: str, url: str | None, as_json: bool) -> None:
    """Show the placement decision behind an invocation's worker, and its result.

    For this invocation, or the latest of a function: the candidates with their predicted time to first token (TTFT),
    time per token after it (TPOT) and cost, why each was chosen or not, and the measured times beside the predicted
    ones. For a hot call, the decision by which its worker had been started earlier.
    """
    with ApiClient(find_server(url, home)) as server:
        id = find_trace(server, which).row.id
        plan = server.get(f"/api/v1/invocations/{quote(id, safe='')}/plan", InvocationPlan)
    if as_json:
        output.json_data(plan)
    else:
        output.data(render_plan(plan))


def render_plan(plan: InvocationPlan) -> str:
    row = plan.row
    head = f"{row.id}   {row.function}@{row.version}, {row.start} start, HTTP {row.status}, worker {row.worker}"
    head += f", engine {plan.engine}" if plan.engine else ""
    head += f", image {plan.image}" if plan.image else ""
    head += f"\n{second_engine_line(plan.second_engine)}" if plan.second_engine is not None else ""
    decision = format_explanation(plan.explanation, tokens=plan.tokens)
    return "\n\n".join([f"{head}\n{_met(plan)}{_way(plan)}", decision, _so_far(plan)])


def _met(plan: InvocationPlan) -> str:
    waited = "it had no answer" if plan.ttft_s is None else f"the caller waited {plan.ttft_s:.3f} s for the first byte"
    if plan.row.start == "hot":
        ago = f"{output.format_age(max(0.0, -plan.decided_s))} before this call"
        return f"its worker was ready when it arrived, {waited}; this is how that worker was started, {ago}"
    if plan.row.start == "standby":
        ago = f"{output.format_age(max(0.0, -plan.decided_s))} before this call"
        return f"its worker was woken from standby for it, {waited}; this is how that worker was started, {ago}"
    if plan.decided_s < 0:
        return f"{waited}; its worker had been ordered {-plan.decided_s:.3f} s before it arrived"
    if plan.ttft_s is None:
        return f"{waited}; its worker was ordered {plan.decided_s:.3f} s after it arrived"
    return f"{waited}, {plan.decided_s:.3f} s of it before its worker was ordered"


def _way(plan: InvocationPlan) -> str:
    """Between the stages of its pipeline, if it was not the direct one."""
    if not plan.relayed:
        return ""
    return f"\nits node could not connect to {stage_list(plan.relayed)}: what they said went through the object store"


def _so_far(plan: InvocationPlan) -> str:
    version = f"{plan.row.function}@{plan.row.version}"
    prediction = plan.prediction
    if prediction is None:
        return f"no start of {version} has been compared with its prediction yet"
    starts = "1 start" if prediction.starts == 1 else f"{prediction.starts} starts"
    what = "TTFT predictions" if plan.tokens else "predictions of the first byte"
    if not prediction.calibrated:
        return f"{what} for {version} are not calibrated yet: {starts} compared, {CALIBRATING} are needed"
    return f"{what} for {version} were off by {prediction.error:.0%} on average, over {starts}"
