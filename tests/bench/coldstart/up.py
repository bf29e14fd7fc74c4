"""Benchmark of bursts at a function that sleeps: pipelines of which as many stages become whole workers as the burst
needs, against as many workers that each start alone.

Both sides may take a worker a host; alone they are planned by a controller in which that one decision is changed
(`controller`). Every call has a prompt of its own, and what it is told must be the same whoever tells it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import httpx

from tests.bench.coldstart.fleet import Fleet, Generated
from tests.bench.coldstart.models import Model
from tests.bench.coldstart.ttft import Found
from tests.bench.coldstart.watch import Watch, Whole
from tests.bench.harness.samples import Options, Report, fine, median, percentile, progress

BURSTS, QUICK_BURSTS = (8, 16, 32), (4,)
TOKENS, QUICK_TOKENS = 48, 8
OURS, SINGLE = "pipelines", "single starts"
SIDES = {OURS: "", SINGLE: "single"}
SLOWEST = 0.9


def crowded(model: Model, hosts: int) -> Model:
    """The same model under a name of its own, with a worker a host."""
    return replace(model, name="crowd", options=("--name", "crowd", "--max", str(hosts)))


def run(report: Report, options: Options, fleet: Fleet, model: Model) -> None:
    """`model` is `crowded`. A round is both sides with one burst."""
    bursts = QUICK_BURSTS if options.quick else BURSTS
    tokens = QUICK_TOKENS if options.quick else TOKENS
    found = Found()
    for number in range(1, options.rounds + 1):
        for burst in bursts:
            progress(f"up: {burst} at once, round {number} of {options.rounds}")
            sides = list(SIDES)
            random.Random(number * 100 + burst).shuffle(sides)
            for side in sides:
                _sample(fleet, model, found, side, burst, tokens)
    report.samples["up"] = {"ttft_s": found.seconds, "details": found.details}
    _tell(report, found, bursts, tokens)


def _row(side: str, burst: int) -> str:
    return f"{burst} at once, {side}"


def _prompt(number: int) -> str:
    return f"Write a short story about the number {number}."


def _sample(fleet: Fleet, model: Model, found: Found, side: str, burst: int, tokens: int) -> None:
    fleet.chill(len(fleet.bed.nodes), change=SIDES[side])
    watch = Watch(fleet, model)
    with ThreadPoolExecutor(burst) as callers:
        watch.start()
        answers = list(callers.map(partial(_call, fleet, model, tokens), range(burst)))
    about = _about(answers, watch.end(), tokens)
    if not about["ttft_s"]:
        raise RuntimeError(f"{model.name}: not one of {burst} calls was answered: {answers[0]}")
    found.note(_row(side, burst), median(about["ttft_s"]), about)


def _call(fleet: Fleet, model: Model, tokens: int, number: int) -> Generated | str:
    """The call's answer, or why there is none."""
    try:
        return fleet.ask(model, tokens=tokens, prompt=_prompt(number))
    except (RuntimeError, httpx.HTTPError) as error:
        return f"{type(error).__name__}: {error}"[:300]


def _about(answers: Sequence[Generated | str], whole: Sequence[Whole], tokens: int) -> dict[str, Any]:
    """Record of each answered call, and when each worker was whole, in seconds from the first call's beginning."""
    good = [one for one in answers if isinstance(one, Generated)]
    began_ns = min((one.sent_ns for one in good), default=0)
    return {
        "ttft_s": [one.ttft_s for one in good],
        "tpot_s": [(one.total_s - one.ttft_s) / (tokens - 1) for one in good],
        "total_s": [one.total_s for one in good],
        "all_s": max((one.pieces_ns[-1] - began_ns for one in good), default=0) / 1e9,
        "tokens": [one.tokens for one in good],
        "short": sum(one.tokens != tokens for one in good),
        "texts": {str(number): one.text for number, one in enumerate(answers) if isinstance(one, Generated)},
        "failed": [one for one in answers if isinstance(one, str)],
        "whole": [{"stage": one.index if one.staged else None, "s": (one.at_ns - began_ns) / 1e9} for one in whole],
    }


def _tell(report: Report, found: Found, bursts: Sequence[int], tokens: int) -> None:
    head = ["a burst, cold", "TTFT, s", "slowest tenth", "ms a token", "slowest tenth", "last token, s"]
    rows = [[*head, "first whole worker, s", "whole workers", "failed"]]
    for burst in bursts:
        for side in SIDES:
            details = found.details[_row(side, burst)]
            ttft, tpot = _figures(details, "ttft_s", 1), _figures(details, "tpot_s", 1e3)
            last = fine(median([one["all_s"] for one in details]))
            first_whole = [one["whole"][0]["s"] for one in details if one["whole"]]
            counts = sorted({len(one["whole"]) for one in details})
            cells = [
                fine(median(first_whole)) if first_whole else "–",
                " or ".join(map(str, counts)),
                str(sum(len(one["failed"]) + one["short"] for one in details)),
            ]
            rows.append([_row(side, burst), *ttft, *tpot, last, *cells])
    report.tell(f"Bursts of calls for {tokens} tokens at a function that sleeps, medians of the rounds", rows)
    print(f"\n{_agreement(found)}")
    for burst in bursts:
        first, each, whole = (_ratio(found, burst, name) for name in ("ttft_s", "tpot_s", "total_s"))
        said = f"single starts take {first:.2f} × the time to a first token, {each:.2f} × a token, {whole:.2f} × in all"
        print(f"With {burst} at once, {said}.")


def _figures(details: Sequence[Any], name: str, unit: float) -> list[str]:
    """The median call's and the slowest tenth's, of the round in the middle."""
    usual = [unit * median(one[name]) for one in details]
    slow = [unit * percentile(one[name], SLOWEST) for one in details]
    return [fine(median(usual)), fine(median(slow))]


def _ratio(found: Found, burst: int, name: str) -> float:
    """Ratio of single starts to ours, round by round, between their mean calls (as figure 14 has it)."""
    pairs = zip(found.details[_row(SINGLE, burst)], found.details[_row(OURS, burst)], strict=True)
    return median([_mean(single[name]) / _mean(ours[name]) for single, ours in pairs])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _agreement(found: Found) -> str:
    told: dict[str, set[str]] = {}
    for details in found.details.values():
        for one in details:
            for number, text in one["texts"].items():
                told.setdefault(number, set()).add(text)
    unlike = sorted(number for number, texts in told.items() if len(texts) > 1)
    return f"Told differently by some: prompts {', '.join(unlike)}." if unlike else "Every prompt had one answer."
