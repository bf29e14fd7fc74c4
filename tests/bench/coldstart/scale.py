"""Benchmark of scaling from one worker, or two, to as many as there are hosts, under a burst: new hosts that are fed by
peers and serve as pipelines where that is sooner, against a multicast whose receivers serve once they are whole, and
against each from the store.

One host or two have the model in memory and serve; the store gives all hosts together what one host's link takes. The
two other sides are ours with a controller in which that one decision is changed (`controller`). Counted are tokens from
the burst on, and the first one that a new host's worker gives. A worker computes with one thread, and with `--cores`
those of each host get so much of a core (control groups of version 1): where all hosts share two cores, one or two
workers otherwise take what four can.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from fleetstart.prefetcher.processes.cgroups import PREFIX as CGROUP_PREFIX
from fleetstart.runtime.contract.ids import NodeId
from tests.bench.coldstart.fleet import CALL_S, Fleet, Generated
from tests.bench.coldstart.models import Model
from tests.bench.coldstart.ttft import Found
from tests.bench.harness.samples import Options, Report, fine, median, progress
from tests.servers import wait_until

BURST, QUICK_BURST = 64, 56
"""Four times the calls that one worker takes at once, so that as many workers are wanted as there are hosts."""
TOKENS, QUICK_TOKENS = 128, 96
COPIES = (1, 2)
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
    burst, tokens = (QUICK_BURST, QUICK_TOKENS) if options.quick else (BURST, TOKENS)
    cores = options.extra["cores"]
    found, bed = Found(), fleet.bed
    bed.limit("store", bed.mbit)  # it is the one thing that all share
    for number in range(1, options.rounds + 1):
        sides = list(SIDES)
        random.Random(number).shuffle(sides)
        for side in sides:
            progress(f"scale from {copies}: {side}, round {number} of {options.rounds}")
            found.note(side, *_sample(fleet, model, SIDES[side], burst, tokens, copies, cores))
    bed.limit("store", 0)
    report.samples[f"scale from {copies}"] = {"all_s": found.seconds, "details": found.details}
    _tell(report, found, copies, len(fleet.bed.nodes), burst, tokens)


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
    fleet: Fleet, model: Model, change: str, burst: int, tokens: int, copies: int, cores: float
) -> tuple[float, dict[str, Any]]:
    fleet.bed.fs("scale", model.name, "--reset")
    fleet.chill(copies, change=change)
    fleet.bed.fs("scale", model.name, "--min", str(copies))
    fleet.ask(model, tokens=1)
    before = _serving(fleet, model, copies)
    fleet.warm_up(before)
    if cores:
        limit_workers(fleet, cores)
    with ThreadPoolExecutor(burst) as callers:
        answers = list(callers.map(partial(_call, fleet, model, tokens), range(burst)))
    good = [one for one in answers if isinstance(one, Generated)]
    if not good:
        raise RuntimeError(f"{model.name}: not one of {burst} calls was answered: {answers[0]}")
    began_ns = min(one.sent_ns for one in good)
    hosts = [fleet.served_by(one) for one in good]
    elsewhere = [
        (host, (one.pieces_ns[0] - began_ns) / 1e9)
        for one, host in zip(good, hosts, strict=True)
        if host not in ("", *before)
    ]
    first_s = {host: min(at_s for other, at_s in elsewhere if other == host) for host, _ in elsewhere}
    last_s = max(one.pieces_ns[-1] - began_ns for one in good) / 1e9
    pieces_s = sorted((piece - began_ns) / 1e9 for one in good for piece in one.pieces_ns)
    return last_s, {
        "tokens": sum(one.tokens for one in good),
        "tokens_per_s": sum(one.tokens for one in good) / last_s,
        "windows": _windows(pieces_s),
        "new_node_s": min(first_s.values(), default=None),
        "first_s": first_s,
        "elsewhere": len(elsewhere),
        "workers": [
            {
                "node": one.order.node,
                "peers": [peer.node for peer in one.order.sources],
                "pulls": len(one.order.pulls),
                "stage": None if one.order.stage is None else one.index,
                "fetched": one.status.fetched,
            }
            for one in fleet.workers(model)
        ],
        "fetched": fleet.fetched(model),
        "texts": {str(number): one.text for number, one in enumerate(answers) if isinstance(one, Generated)},
        "failed": [one for one in answers if isinstance(one, str)],
    }


def _call(fleet: Fleet, model: Model, tokens: int, number: int) -> Generated | str:
    """The call's answer, or why there is none."""
    try:
        return fleet.ask(model, tokens=tokens, prompt=f"Write a short story about the number {number}.")
    except (RuntimeError, httpx.HTTPError) as error:
        return f"{type(error).__name__}: {error}"[:300]


def _windows(pieces_s: Sequence[float]) -> list[int]:
    """Pieces in each window of time."""
    counts = [0] * (int(pieces_s[-1] / WINDOW_S) + 1)
    for piece_s in pieces_s:
        counts[int(piece_s / WINDOW_S)] += 1
    return counts


def _tell(report: Report, found: Found, copies: int, hosts: int, burst: int, tokens: int) -> None:
    head = [
        "new hosts",
        "tokens/s",
        "last token, s",
        "first token on a new host, s",
        "on the last one, s",
        "calls there",
    ]
    rows = [[*head, "from the store, MB", "from peers, MB", "failed"]]
    for side in SIDES:
        details = found.details[side]
        first = [one["new_node_s"] for one in details if one["new_node_s"] is not None]
        last = [max(one["first_s"].values()) for one in details if one["first_s"]]
        rows.append([
            side,
            fine(median([one["tokens_per_s"] for one in details])),
            fine(median(found.seconds[side])),
            fine(median(first)) if first else "–",
            fine(median(last)) if last else "–",
            fine(median([one["elsewhere"] for one in details])),
            fine(median([one["fetched"].get("store", 0) / 1e6 for one in details])),
            fine(median([one["fetched"].get("peer", 0) / 1e6 for one in details])),
            str(sum(len(one["failed"]) for one in details)),
        ])  # fmt: skip
    report.tell(
        f"From {copies} to {hosts} workers under {burst} calls for {tokens} tokens, medians of the rounds", rows
    )
    told: dict[str, set[str]] = {}
    for details in found.details.values():
        for one in details:
            for number, text in one["texts"].items():
                told.setdefault(number, set()).add(text)
    unlike = sorted(number for number, texts in told.items() if len(texts) > 1)
    report.tell(
        f"Tokens, whichever way a worker came, from {copies}",
        [["prompts", "answered differently by some"], [str(len(told)), ", ".join(unlike) or "none"]],
    )
