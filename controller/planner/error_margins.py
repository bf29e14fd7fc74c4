"""Error margins: factors on a predicted TTFT before it is compared with the SLO.

Half of the predictions that are right on average are exceeded. So the planner keeps the ratios of observed to predicted
TTFT of the last starts, and multiplies a prediction by a high quantile of them before it promises it. By kind, because
they err differently: a start without a fetch by tenths of a second, one with a fetch by what happens on its
link, a group by the slowest of its stages. HydraServe promises the bare prediction (section 4.1); this is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

Kind = Literal["warm", "alone", "group"]
"""Kinds of start: no weights to fetch; one worker that fetches; several."""
Ratios = Mapping[Kind, Sequence[float]]
"""Observed TTFT over predicted, of the last starts of each kind, the latest last."""

KEPT = 20
"""Ratios kept for one version and kind: a day of a rarely called function, a minute of a busy one."""
ENOUGH = 10
"""Ratios with which a version's own quantile is used; missing ones are filled with the other versions' quantile."""
QUANTILE = 0.9
PRIOR = 1.2
"""Margin before any start was observed."""
MOST = 2.0
"""Maximum margin: above it the prediction is wrong, not uncertain, and no margin makes up for that."""


class Margins(NamedTuple):
    """Factors on a predicted TTFT, at least 1."""

    warm: float = PRIOR
    alone: float = PRIOR
    group: float = PRIOR


PRIOR_MARGINS = Margins()


def with_ratio(known: Ratios, kind: Kind, ratio: float) -> dict[Kind, list[float]]:
    return {**{name: list(ratios) for name, ratios in known.items()}, kind: [*known.get(kind, ()), ratio][-KEPT:]}


def pooled_margins(versions: Iterable[Ratios]) -> Margins:
    """The margins of all versions together, for those with few starts of their own."""
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
