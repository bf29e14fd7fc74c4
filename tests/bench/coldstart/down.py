"""Benchmark of consolidation: a long generation that a pipeline begins and one worker ends, against a pipeline alone.

Both begin cold. Staying is ordered by a controller in which that one decision is changed (`controller`); all
else is the same. Alone, and four at once. The rates on each side of the change, and the largest gap between two pieces
of text around it, in units of the usual gap: what a reader sees of the consolidation.
"""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tests.bench.coldstart.fleet import Fleet, Generated
from tests.bench.coldstart.models import Model
from tests.bench.coldstart.ttft import Found, ran_on
from tests.bench.coldstart.watch import Watch
from tests.bench.harness.samples import Options, Report, fine, median, progress, spread

TOKENS, QUICK_TOKENS = 600, 40
STREAMS = (1, 4)
AROUND_S = 1.5
"""Before and after the first stage says that it is whole."""
SIDES = {"consolidated": "", "stays a pipeline": "stay"}


def run(report: Report, options: Options, fleet: Fleet, model: Model) -> None:
    found = Found()
    cases = [(side, streams) for streams in STREAMS for side in SIDES]
    if options.quick:
        cases = cases[:2]
    for number in range(1, options.rounds + 1):
        progress(f"down: round {number} of {options.rounds}")
        runners = [partial(_sample, fleet, model, found, *case, options.quick) for case in cases]
        random.Random(number).shuffle(runners)
        for runner in runners:
            runner()
    report.samples["down"] = {"total_s": found.seconds, "details": found.details}
    _tell(report, found, sorted({streams for _, streams in cases}))


def _sample(fleet: Fleet, model: Model, found: Found, side: str, streams: int, quick: bool) -> None:
    tokens = QUICK_TOKENS if quick else TOKENS
    stages = len(fleet.bed.nodes)
    fleet.chill(stages, change=SIDES[side])
    watch = Watch(fleet, model)
    with ThreadPoolExecutor(streams) as callers:
        watch.start()
        generated = list(callers.map(lambda _: fleet.ask(model, tokens=tokens), range(streams)))
    whole_ns = next((one.at_ns for one in watch.end() if one.staged and one.index == 0), None)
    ran_on(watch.hosts, stages, model)
    total_s = max(one.total_s for one in generated)
    found.note(_row(side, streams), total_s, _about(generated, whole_ns))


def _row(side: str, streams: int) -> str:
    return f"{side}, {streams} at once" if streams > 1 else side


def _about(generated: list[Generated], whole_ns: int | None) -> dict[str, Any]:
    """Gaps are of the first stream: the others' pieces come with its own."""
    first = generated[0]
    about: dict[str, Any] = {
        "ttft_s": [one.ttft_s for one in generated],
        "pieces_s": first.seconds,
        "texts": sorted({one.text for one in generated}),
    }
    stamps = first.pieces_ns
    gaps = [(after, (after - before) / 1e9) for before, after in itertools.pairwise(stamps)]
    if whole_ns is None or not stamps[0] < whole_ns < stamps[-1]:
        return about | {"tpot_s": (stamps[-1] - stamps[0]) / 1e9 / max(1, len(gaps))}
    around_ns = AROUND_S * 1e9
    before_s = [gap for ended, gap in gaps if ended < whole_ns - around_ns]
    after_s = [gap for ended, gap in gaps if ended > whole_ns + around_ns]
    during_s = [gap for ended, gap in gaps if abs(ended - whole_ns) <= around_ns]
    usual_s = median([gap for _, gap in gaps])
    return about | {
        "whole_s": (whole_ns - first.sent_ns) / 1e9,
        "tpot_before_s": sum(before_s) / len(before_s) if before_s else None,
        "tpot_after_s": sum(after_s) / len(after_s) if after_s else None,
        "largest_gap_in_usual": max(during_s) / usual_s if during_s and usual_s else None,
    }


def _tell(report: Report, found: Found, several: list[int]) -> None:
    rows = [["a long generation, cold", "whole, s", "ms a token", "on the pipeline", "alone", "largest gap / usual"]]
    for streams in several:
        for side in SIDES:
            row = _row(side, streams)
            details = found.details[row]
            cells = [_milliseconds(details, name) for name in ("tpot_s", "tpot_before_s", "tpot_after_s")]
            gaps = [one["largest_gap_in_usual"] for one in details if one.get("largest_gap_in_usual")]
            rows.append([row, spread(found.seconds[row]), *cells, f"{fine(max(gaps))}×" if gaps else "–"])
    report.tell("A generation that begins on all hosts", rows)
    texts = {text for details in found.details.values() for one in details for text in one["texts"]}
    print(f"\nAll said the same: {'yes' if len(texts) == 1 else f'no, there are {len(texts)} texts'}.")
    for streams in several:
        ratio = median(found.ratios(_row("stays a pipeline", streams), _row("consolidated", streams)))
        print(f"With {streams} at once, staying a pipeline takes {ratio:.2f} × the time of consolidating.")


def _milliseconds(details: list[Any], name: str) -> str:
    values = [1e3 * one[name] for one in details if one.get(name) is not None]
    return fine(median(values)) if values else "–"
