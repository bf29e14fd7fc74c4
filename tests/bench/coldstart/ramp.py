"""Chart of the part `scale` of `coldstart`: tokens a second from the burst on, a line for each way to feed new hosts
(λScale, figures 9 to 11), and since when the first of these is whole, dotted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.coldstart.scale import OURS, SIDES, WINDOW_S
from tests.bench.harness.plotting import load_pyplot
from tests.bench.harness.samples import median

COLOURS = dict(zip(SIDES, ("#2171b5", "#6baed6", "#9a9a9a"), strict=True))
PREFIX = "scale from "


def draw(found: Any, path: Path | None) -> None:
    """`found` as `coldstart` writes it. Ends the process with a word where there is nothing to draw with or to."""
    if path is None:
        sys.exit("--draw needs --ramp PNG")
    parts = {name: part for name, part in found["samples"].items() if name.startswith(PREFIX)}
    if not parts:
        sys.exit("there is no ramp to draw: run the part `scale`")
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(
        1, len(parts), figsize=(3.8 * len(parts), 3.2), dpi=110, sharey=True, squeeze=False
    )
    for axes, (name, part) in zip(panels[0], parts.items(), strict=True):
        for side in SIDES:
            rates = ramp([one["windows"] for one in part["details"][side]])
            middles = [(number + 0.5) * WINDOW_S for number in range(len(rates))]
            axes.plot(middles, rates, color=COLOURS[side], linewidth=2.0 if side == OURS else 1.4, label=side)
            whole = [min(one["whole_s"].values()) for one in part["details"][side] if one["whole_s"]]
            if whole:
                axes.axvline(median(whole), color=COLOURS[side], linestyle="dotted", linewidth=1)
        axes.set_title(f"{name} to {found['setup']['hosts']} workers, medians", fontsize=10)
        axes.set_xlabel("seconds from the burst on")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
    panels[0][0].set_ylabel("tokens a second")
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)


def ramp(rounds: Sequence[Sequence[int]]) -> list[float]:
    """Median of the rounds' tokens a second in each window; a round that is over gives none."""
    longest = max(map(len, rounds))
    padded = [[*counts, *[0] * (longest - len(counts))] for counts in rounds]
    return [median([counts[window] / WINDOW_S for counts in padded]) for window in range(longest)]
