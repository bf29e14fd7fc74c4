"""How much longer than predicted a start may take: what a candidate must have in hand to be held within its SLO.

Of predictions that are right on average half are exceeded. So the planner keeps what its last starts took over what
was predicted for them, and multiplies a prediction by a high quantile of that before it makes a promise of it. By kind,
because they err differently: a start without a fetch by tenths of a second, one with a fetch by what happens on its
link, a group by the slowest of its stages. HydraServe promises the bare prediction (section 4.1); this is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

Kind = Literal["warm", "alone", "group"]
"""No weights to fetch; one worker that fetches; several."""
Ratios = Mapping[Kind, Sequence[float]]
"""Observed TTFT over predicted, of the last starts of each kind, the latest last."""

KEPT = 20
"""Of one version and kind: a day of a function that is seldom called, a minute of one that is always."""
ENOUGH = 10
"""With so many a version speaks for itself; what is missing is taken from the other versions' quantile."""
QUANTILE = 0.9
PRIOR = 1.2
"""Of starts that nobody has seen yet."""
MOST = 2.0
"""Beyond it the prediction is wrong, not uncertain: no margin makes up for that."""


class Margins(NamedTuple):
    """Factors on a predicted TTFT, at least 1."""

    warm: float = PRIOR
    alone: float = PRIOR
    group: float = PRIOR


PRIOR_MARGINS = Margins()


def with_ratio(known: Ratios, kind: Kind, ratio: float) -> dict[Kind, list[float]]:
    return {**{one: list(ratios) for one, ratios in known.items()}, kind: [*known.get(kind, ()), ratio][-KEPT:]}


def pooled_margins(versions: Iterable[Ratios]) -> Margins:
    """Of all versions together, for those that have started seldom."""
    pooled: dict[Kind, list[float]] = {}
    for ratios in versions:
        for kind, found in ratios.items():
            pooled.setdefault(kind, []).extend(found)
    return margins_of(pooled, PRIOR_MARGINS)


def margins_of(own: Ratios, others: Margins) -> Margins:
    return Margins(
        warm=_margin(own.get("warm", ()), others.warm),
        alone=_margin(own.get("alone", ()), others.alone),
        group=_margin(own.get("group", ()), others.group),
    )


def _margin(ratios: Sequence[float], other: float) -> float:
    samples = sorted([*ratios, *[other] * (ENOUGH - len(ratios))])
    return min(MOST, max(1.0, samples[math.ceil(QUANTILE * len(samples)) - 1]))
