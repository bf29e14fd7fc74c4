"""Chart of the arrivals of blocks at the receivers, as distributions (λScale, figure 8)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.bench.harness.plotting import load_pyplot
from tests.bench.multicast.ways import CHAIN, GLOO, GLOO_BLOCKS, PIPELINE, TREE

DRAWN = {PIPELINE: "#2171b5", CHAIN: "#6baed6", TREE: "#fd8d3c", GLOO_BLOCKS: "#969696", GLOO: "#d62728"}


def draw(found: Any, path: Path | None) -> None:
    """`found` as `multicast` writes it. Ends the process with a word where there is nothing to draw with or to."""
    if path is None:
        sys.exit("--draw needs --chart PNG")
    pyplot = load_pyplot()
    count = len(found["samples"])
    figure, places = pyplot.subplots(1, count, figsize=(9, 3.4), dpi=110, sharey=True, squeeze=False)
    places = places[0]
    for axes, (receivers, part) in zip(places, found["samples"].items(), strict=True):
        _distributions(axes, part["arrivals_s"])
        axes.set_title(f"{receivers} receivers", fontsize=10)
        axes.set_xlabel("s after the start")
        axes.spines[["top", "right"]].set_visible(False)
    places[0].set_ylabel("share of the blocks that have arrived")
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, loc="upper center", ncols=len(labels))
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)


def _distributions(axes: Any, cases: dict[str, list[list[list[float]]]]) -> None:
    for way, colour in DRAWN.items():
        runs = next((runs for case, runs in cases.items() if case == f"{way}, 32"), [])
        times = sorted(arrived for run in runs for receiver in run for arrived in receiver)
        if times:
            shares = [(number + 1) / len(times) for number in range(len(times))]
            axes.step([0.0, *times], [0.0, *shares], where="post", color=colour, linewidth=1.2, label=way)
