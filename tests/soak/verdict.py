"""Verdict of a soak: whether each series of samples is flat after its warm-up, within its own noise. Pure.

A leak is a line that rises for as long as the soak lasts. Its slope is the median of the slopes between all pairs of
samples (Theil and Sen), which a compaction, a garbage collection or a burst does not move. What users asked to have
kept, such as the ledger's rows, may grow: by so much a call, and no more.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

SAMPLES_LEAST = 8
"""Fewer after the warm-up, and a slope is chance."""
SAMPLES_MOST = 200
"""More are thinned out: the slopes of pairs are as many as the square of it."""
NOISE_SHARE = 3.0
"""Growth in typical deviations from the line that is still chance."""
RELATIVE_SHARE = 0.03
"""Growth relative to the level that is not told from one: allocators and tables grow by steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    """(seconds since the start, value)."""
    least: float = 0.0
    """Growth that means nothing, in the series' own unit: a page, a file, a worker more."""
    by_design: float = 0.0
    """Growth after the warm-up that is by design: what is kept for users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    name: str
    first: float
    """Median of the first tenth of the samples after the warm-up; `last` of the last tenth."""
    last: float
    per_hour: float
    """Slope."""
    growth: float
    """Slope times the time between first and last sample."""
    allowed: float
    by_design: float
    """Part of `allowed` that is kept for users."""

    @property
    def flat(self) -> bool:
        return self.growth <= self.allowed


def judge(series: Series, *, warmup_s: float) -> Verdict:
    """Verdict over what comes after the warm-up.

    Errors: ValueError if there are too few samples.
    """
    after = [(at_s, value) for at_s, value in series.points if at_s >= warmup_s]
    if len(after) < SAMPLES_LEAST:
        raise ValueError(
            f"{series.name}: {len(after)} samples after a warm-up of {warmup_s:g} s, and a slope takes "
            f"{SAMPLES_LEAST}: run longer, or sample more often"
        )
    points = after[:: -(-len(after) // SAMPLES_MOST)]
    slope = statistics.median(
        (later - earlier) / (to_s - from_s) for (from_s, earlier), (to_s, later) in combinations(points, 2)
    )
    level = statistics.median(value - slope * at_s for at_s, value in points)
    noise = statistics.median(abs(value - level - slope * at_s) for at_s, value in points)
    tenth = max(1, len(after) // 10)
    typical = statistics.median(value for _, value in after)
    return Verdict(
        name=series.name,
        first=statistics.median(value for _, value in after[:tenth]),
        last=statistics.median(value for _, value in after[-tenth:]),
        per_hour=slope * 3600,
        growth=slope * (after[-1][0] - after[0][0]),
        allowed=max(series.least, NOISE_SHARE * noise, RELATIVE_SHARE * abs(typical)) + series.by_design,
        by_design=series.by_design,
    )


def table(verdicts: Sequence[Verdict], *, calls: int) -> str:
    """The verdicts as a Markdown table; what grows comes first."""
    lines = [
        "| series | first | last | a hour | a call | verdict |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for one in sorted(verdicts, key=lambda one: (one.flat, one.name)):
        word = "flat" if one.flat else "GROWS"
        if one.flat and one.by_design and one.growth > one.allowed - one.by_design:
            word = "kept for users"
        per_call = f"{one.growth / calls:,.1f}" if one.by_design and calls else ""
        lines.append(
            f"| {one.name} | {one.first:,.0f} | {one.last:,.0f} | {one.per_hour:+,.1f} | {per_call} | {word} |"
        )
    return "\n".join(lines)
