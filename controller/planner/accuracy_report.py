"""Reports of plans: prediction and outcome side by side, for `fs explain` as text and as JSON, and for the metrics."""

from __future__ import annotations

import msgspec

from fleetstart.runtime.contract.node.speed import ModeSwitch
from fleetstart.runtime.contract.sizes import MIB

from .estimates import relative_error
from .multicast.plan import MulticastCandidate
from .plan import CandidateReport, Plan, StagePlan


class ObservedStart(msgspec.Struct, frozen=True, kw_only=True):
    """The observed outcome of a start, from the decision on; None for what was not observed (yet)."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    cost_gib_s: float | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted figure beside the observed one."""

    what: str
    predicted: float
    observed: float | None = None
    error: float | None = None
    """|observed - predicted| / observed."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """A plan and its outcome, as `fs explain --json` prints them."""

    plan: Plan
    compared: list[Comparison]


def explain(plan: Plan, outcome: ObservedStart) -> Explanation:
    pairs = (
        ("TTFT, s", plan.ttft_s, outcome.ttft_s),
        ("TPOT, s", plan.tpot_s, outcome.tpot_s),
        ("cost, GiB·s", plan.cost_gib_s, outcome.cost_gib_s),
    )
    compared = [
        Comparison(
            what=what,
            predicted=predicted,
            observed=observed,
            error=relative_error(predicted, observed) if observed is not None else None,
        )
        for what, predicted, observed in pairs
    ]
    return Explanation(plan=plan, compared=compared if plan.stages else [])


def format_explanation(explanation: Explanation, *, tokens: bool = True) -> str:
    """Formats the decision, its stages, prediction and outcome, and the candidates, as aligned columns. Without
    `tokens`, for a function that has none, TTFT is its first byte."""
    text = _format(explanation, () if tokens else ("TPOT, s",))
    return text if tokens else text.replace("TTFT, s", "first byte, s").replace("TTFT", "first byte")


def _format(explanation: Explanation, left_out: tuple[str, ...]) -> str:
    plan = explanation.plan
    if not plan.stages:
        return "\n".join([f"nothing was started: {plan.reason}", *_table(_candidates(plan.considered))])
    head = f"{_counted(plan)}: {plan.reason}"
    if plan.regions:
        head += f"\nit may run in {', '.join(plan.regions)}"
    if plan.isolation != "namespaces":
        head += f"\nit runs inside {plan.isolation}, as a whole worker: stages inside it could not reach each other"
    hidden_s = plan.sequential_ttft_s - plan.ttft_s
    if hidden_s > 0:
        head += f"\noverlapping the parts of the start hides {hidden_s:.2f} s"
    if plan.switch is not None:
        head += f"\n{_switched(plan.switch)}"
    compared = [one for one in explanation.compared if one.what not in left_out]
    layers = () if any(stage.end > 1 for stage in plan.stages) else ("layers",)  # without any, it is 0 to 1
    peers = () if any(stage.peers for stage in plan.stages) else ("from peers",)
    parts = [[head], _table(_without(_stages(plan.stages), (*layers, *peers))), _table(_outcome(compared))]
    if plan.considered:
        fetched = any(one.missing_bytes for one in plan.considered)
        sources = () if fetched else ("weights from",)
        parts.append(_table(_without(_candidates(plan.considered), (*left_out, *sources))))
    if plan.ways:
        parts.append(_table(_ways(plan.ways)))
    return "\n\n".join("\n".join(part) for part in parts)


def _counted(plan: Plan) -> str:
    stages = len(plan.stages)
    if not plan.together:
        return f"{stages} whole workers"
    return "a single worker" if stages == 1 else f"a pipeline of {stages}"


def _switched(switch: ModeSwitch) -> str:
    """How the requests of a pipeline went on at one worker."""
    tokens = switch.copied_tokens + switch.recomputed_tokens
    if not tokens:
        return "no request ran when it became one worker"
    ways = (("copied", switch.copied_tokens), ("computed again", switch.recomputed_tokens))
    how = " and ".join(f"those of {count} tokens were {way}" for way, count in ways if count)
    return (
        f"when it became one worker, running requests took their keys and values along: {how}, in "
        f"{switch.took_s:.3f} s; predicted {switch.copy_s:.3f} s to copy all, {switch.recompute_s:.3f} s to compute all"
    )


def _stages(stages: list[StagePlan]) -> list[list[str]]:
    rows = [["stage", "node", "layers", "memory", "to fetch", "from the store", "from peers", "fetch, s", "within, s"]]
    for index, stage in enumerate(stages):
        node = f"{stage.node} ({stage.region})" if stage.region else stage.node
        if stage.devices:
            node += f" on {', '.join(share.id for share in stage.devices)}"
        within = "–" if stage.fetch_within_s is None else f"{stage.fetch_within_s:.2f}"
        rows.append([
            str(index), node, f"{stage.first}–{stage.end - 1}", "whole" if stage.full else "its share",
            f"{(stage.missing_bytes + stage.files_bytes) / MIB:.0f} MiB",
            f"{(stage.store_bytes + stage.files_bytes) / MIB:.0f} MiB",
            ", ".join(f"{share.size_bytes / MIB:.0f} MiB {share.node}" for share in stage.peers) or "–",
            f"{stage.fetch_s:.2f}",
            within,
        ])  # fmt: skip
    return rows


def _outcome(compared: list[Comparison]) -> list[list[str]]:
    rows = [["", "predicted", "observed", "error"]]
    for comparison in compared:
        observed = "–" if comparison.observed is None else f"{comparison.observed:.3f}"
        rows.append(
            [
                comparison.what,
                f"{comparison.predicted:.3f}",
                observed,
                "–" if comparison.error is None else f"{comparison.error:.0%}",
            ]
        )
    return rows


def _candidates(considered: list[CandidateReport]) -> list[list[str]]:
    rows = [["stages", "whole", "TTFT, s", "margin", "TPOT, s", "GiB·s", "weights from", "nodes", "why not"]]
    for candidate in considered:
        figures = ["–"] * 5
        if candidate.nodes:
            figures = [
                f"{candidate.ttft_s:.2f}",
                f"× {candidate.margin:.2f}",
                f"{candidate.tpot_s:.3f}",
                f"{candidate.cost_gib_s:.1f}",
                weights_from(candidate),
            ]
        rows.append(
            [
                str(candidate.stages) if candidate.kind == "start" else candidate.kind,
                str(candidate.full),
                *figures,
                " ".join(candidate.nodes),
                candidate.why_not or "taken",
            ]
        )
    return rows


def _ways(ways: list[MulticastCandidate]) -> list[list[str]]:
    rows = [["multicast by", "all whole, s", "mean, s", "steps", "why not"]]
    for way in ways:
        rows.append([way.name, f"{way.seconds:.2f}", f"{way.mean_s:.2f}", str(way.steps), way.why_not or "taken"])
    return rows


def weights_from(candidate: CandidateReport) -> str:
    """The sources of a candidate's weights in words, the largest first."""
    disk_bytes = candidate.missing_bytes - candidate.store_bytes - candidate.peer_bytes
    sizes = {"store": candidate.store_bytes, "peers": candidate.peer_bytes, "disk": disk_bytes}
    named = [name for name, size in sorted(sizes.items(), key=lambda pair: -pair[1]) if size >= MIB]
    return ", ".join(named) or "memory"


def _without(rows: list[list[str]], names: tuple[str, ...]) -> list[list[str]]:
    """The table less the columns of these heads."""
    kept = [at for at, head in enumerate(rows[0]) if head not in names]
    return [[row[at] for at in kept] for row in rows]


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
