"""Benchmark of scaling from one worker, or two, to as many as there are hosts, under a burst: new hosts that are fed by
peers and serve as pipelines where that is sooner, against a multicast whose receivers serve once they are whole, and
against each from the store.

One host or two have the model in memory and serve; the store gives all hosts together what one host's link takes. The
two other sides are ours with a controller in which that one decision is changed (`controller`). Callers ask again once
they are answered, for longer than the store takes to feed all new hosts. Counted are tokens of that time, the first one
that a new host gives, and those of hosts that are not whole yet. A worker computes with one thread, and with `--cores`
those of each host get so much of a core (control groups of version 1): where all hosts share two cores, one or two
workers otherwise take what four can.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from fleetstart.prefetcher.processes.control_groups.groups import PREFIX as CGROUP_PREFIX
from fleetstart.runtime.contract.ids import NodeId
from tests.bench.coldstart.callers import call_again
from tests.bench.coldstart.fleet import CALL_S, Fleet
from tests.bench.coldstart.models import Model
from tests.bench.coldstart.ttft import Found
from tests.bench.coldstart.watch import Watch
from tests.bench.harness.samples import Options, Report, fine, median, progress
from tests.servers import wait_until

CALLERS_A_HOST = 16
"""Callers for each host: a worker takes as many at a time, so that as many workers are wanted as there are hosts."""
TOKENS, QUICK_TOKENS = 128, 64
COPIES = (1, 2)
STARTS_S = 10.0
"""For which callers ask beyond the time in which the store has fed all new hosts."""
OURS = "peers, serving while they load"
SIDES = {OURS: "", "multicast, then serving": "multicast", "each from the store": "store"}
WINDOW_S = 2.0
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000
"""So short that no step of a worker waits long for the rest of its share."""


def scaled(model: Model, hosts: int) -> Model:
    """The same model under a name of its own, with a worker of one thread a host."""
    handler = model.handler.with_name("scaled.py")
    handler.write_text(model.handler.read_text().replace("LLM(", "LLM(threads=1, ", 1))
    return replace(model, name="scaled", handler=handler, options=("--name", "scaled", "--max", str(hosts)))


def run(report: Report, options: Options, fleet: Fleet, model: Model, copies: int) -> None:
    """`model` is `scaled`. A round is one burst for each side. `copies`: workers that there are before it."""
    tokens, cores = QUICK_TOKENS if options.quick else TOKENS, options.extra["cores"]
    found, bed = Found(), fleet.bed
    hosts = len(bed.nodes)
    lasts_s = (hosts - copies) * fleet.size_bytes(model) / (bed.mbit * 1e6 / 8) + STARTS_S
    bed.limit("store", bed.mbit)  # it is the one thing that all share
    for number in range(1, options.rounds + 1):
        sides = list(SIDES)
        random.Random(number).shuffle(sides)
        for side in sides:
            progress(f"scale from {copies}: {side}, round {number} of {options.rounds}")
            found.note(side, *_sample(fleet, model, SIDES[side], tokens, lasts_s, copies, cores))
    bed.limit("store", 0)
    report.samples[f"scale from {copies}"] = {"all_s": found.seconds, "details": found.details}
    _tell(report, found, f"From {copies} to {hosts} workers, {hosts * CALLERS_A_HOST} callers, {lasts_s:.0f} s")


def limit_workers(fleet: Fleet, cores: float) -> None:
    """Gives the workers of each host so much of a core from now on."""
    for index in range(len(fleet.bed.nodes)):
        report = fleet.bed.report(index)
        assert report is not None, "a host that has come up"
        group = CPU_GROUPS / f"{CGROUP_PREFIX}{report.epoch}"
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(PERIOD_US * cores)))


def _serving(fleet: Fleet, model: Model, copies: int) -> list[NodeId]:
    """The hosts of whole workers, once there are so many."""

    def whole() -> list[NodeId] | None:
        workers = fleet.workers(model)
        good = [one.order.node for one in workers if one.status.state == "ready" and one.status.whole]
        return good if len(good) == len(workers) == copies else None

    return wait_until(whole, CALL_S, what=f"{copies} whole workers") or []


def _sample(
    fleet: Fleet, model: Model, change: str, tokens: int, lasts_s: float, copies: int, cores: float
) -> tuple[float, dict[str, Any]]:
    """When the first new host answers, or the time that callers ask for if none does, and all else."""
    fleet.bed.fs("scale", model.name, "--reset")
    fleet.chill(copies, change=change)
    fleet.bed.fs("scale", model.name, "--min", str(copies))
    fleet.ask(model, tokens=1)
    before = _serving(fleet, model, copies)
    fleet.warm_up(before)
    if cores:
        limit_workers(fleet, cores)
    watch = Watch(fleet, model)
    watch.start()
    asked = call_again(fleet, model, callers=CALLERS_A_HOST * len(fleet.bed.nodes), tokens=tokens, lasts_s=lasts_s)
    whole_s = {one.node: (one.at_ns - asked.began_ns) / 1e9 for one in watch.end() if one.node not in before}
    calls = list(asked.tokens_s(fleet))
    new = [(node, times) for node, times in calls if node not in ("", *before)]
    first_s = {node: min(times[0] for other, times in new if other == node) for node, _ in new}
    counted = sorted(at_s for _, times in calls for at_s in times if at_s < lasts_s)
    return min(first_s.values(), default=lasts_s), {
        "tokens_per_s": len(counted) / lasts_s,
        "windows": _windows(counted),
        "first_s": first_s,
        "whole_s": whole_s,
        "calls": len(asked.answers),
        "calls_elsewhere": len(new),
        "tokens_before_whole": sum(at_s < whole_s.get(node, lasts_s) for node, times in new for at_s in times),
        "workers": _workers(fleet, model),
        "fetched": fleet.fetched(model),
        "texts": {str(number): _digest(one.text) for number, one in asked.answers.items()},
        "failed": asked.failed,
    }


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def _workers(fleet: Fleet, model: Model) -> list[dict[str, Any]]:
    return [
        {
            "node": one.order.node,
            "peers": [peer.node for peer in one.order.sources],
            "pulls": len(one.order.pulls),
            "stage": None if one.order.stage is None else one.index,
            "fetched": one.status.fetched,
        }
        for one in fleet.workers(model)
    ]


def _windows(pieces_s: Sequence[float]) -> list[int]:
    """Tokens in each window of time."""
    counts = [0] * (int(pieces_s[-1] / WINDOW_S) + 1)
    for piece_s in pieces_s:
        counts[int(piece_s / WINDOW_S)] += 1
    return counts


def _tell(report: Report, found: Found, title: str) -> None:
    head = [
        "new hosts",
        "tokens/s",
        "first token on a new host, s",
        "on the last one, s",
        "whole: first, last, s",
        "tokens before whole",
        "calls there, of all",
    ]
    rows = [[*head, "from the store, MB", "from peers, MB", "failed"]]
    for side in SIDES:
        details = found.details[side]
        first = [min(one["first_s"].values()) for one in details if one["first_s"]]
        last = [max(one["first_s"].values()) for one in details if one["first_s"]]
        whole = [(min(one["whole_s"].values()), max(one["whole_s"].values())) for one in details if one["whole_s"]]
        rows.append([
            side,
            fine(median([one["tokens_per_s"] for one in details])),
            fine(median(first)) if first else "–",
            fine(median(last)) if last else "–",
            f"{fine(median([one for one, _ in whole]))}, {fine(median([one for _, one in whole]))}" if whole else "–",
            fine(median([one["tokens_before_whole"] for one in details])),
            f"{fine(median([one['calls_elsewhere'] for one in details]))}, "
            f"{fine(median([one['calls'] for one in details]))}",
            fine(median([one["fetched"].get("store", 0) / 1e6 for one in details])),
            fine(median([one["fetched"].get("peer", 0) / 1e6 for one in details])),
            str(sum(len(one["failed"]) for one in details)),
        ])  # fmt: skip
    report.tell(f"{title}, medians of the rounds", rows)
    told: dict[str, set[str]] = {}
    for details in found.details.values():
        for one in details:
            for number, text in one["texts"].items():
                told.setdefault(number, set()).add(text)
    unlike = sorted(number for number, texts in told.items() if len(texts) > 1)
    report.tell(
        f"Tokens, whichever way a worker came: {title.lower()}",
        [["prompts", "answered differently by some"], [str(len(told)), ", ".join(unlike) or "none"]],
    )
