"""Chart of the first tokens of `coldstart` as bars, a group a model (HydraServe, figures 7 and 8)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.bench.coldstart.ttft import FLOOR, SERIAL, SIZES, title
from tests.bench.harness.plotting import load_pyplot
from tests.bench.harness.samples import median

ROWS = (SERIAL, *map(title, SIZES))
COLOURS = ("#9a9a9a", "#c6dbef", "#9ecae1", "#6baed6", "#2171b5")
WIDTH = 0.16
PREFIX = "ttft, "


def draw(found: Any, path: Path | None) -> None:
    """`found` as `coldstart` writes it. Ends the process with a word where there is nothing to draw with or to."""
    if path is None:
        sys.exit("--draw needs --chart PNG")
    groups = {name.removeprefix(PREFIX): part for name, part in found["samples"].items() if name.startswith(PREFIX)}
    if not groups:
        sys.exit("there are no first tokens to draw: run the part `ttft`")
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(7.2, 3.6), dpi=110)
    for place, part in enumerate(groups.values()):
        _group(axes, place, part["seconds"])
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel("time to first token, s")
    axes.set_title(f"Cold starts over links of {found['setup']['mbit']:g} Mbit/s, medians", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    handles, labels = axes.get_legend_handles_labels()
    known = dict(zip(labels, handles, strict=True))
    axes.legend(known.values(), known, frameon=False, fontsize=8, loc="upper left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)


def _group(axes: Any, place: int, seconds: dict[str, list[float]]) -> None:
    rows = [row for row in ROWS if seconds.get(row)]
    for number, row in enumerate(rows):
        at, value = place + (number - (len(rows) - 1) / 2) * WIDTH, median(seconds[row])
        low, high = min(seconds[row]), max(seconds[row])
        axes.bar(at, value, WIDTH * 0.92, color=COLOURS[ROWS.index(row)], label=row)
        axes.errorbar(at, value, [[value - low], [high - value]], color="#444444", linewidth=0.8, capsize=2)
        axes.text(at, high, f"{value:.1f}", ha="center", va="bottom", fontsize=8)
    half = (len(rows) + 0.4) / 2 * WIDTH
    floor = median(seconds[FLOOR])
    axes.hlines(floor, place - half, place + half, colors="#d62728", linestyles="dashed", linewidth=1, label=FLOOR)
