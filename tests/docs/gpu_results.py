"""Tables of `make gpu` for docs/results.md, out of docs/measurements/gpu.json."""

from __future__ import annotations

import json
from typing import Any

from tests.docs.pages import ROOT

MEASURED = ROOT / "docs/measurements/gpu.json"
NOT_RUN = (
    "**Not run.** No GPU was at hand: what needs one has been tried on the CPU alone, with small models. On a machine\n"
    "with one `make gpu` runs all of it in at most 40 minutes, and writes its tables here."
)


def markdown() -> str:
    return tables(json.loads(MEASURED.read_text())) if MEASURED.exists() else NOT_RUN


def tables(found: dict[str, Any]) -> str:
    """The machine in a line, then each table under its title."""
    machine, setup = found["machine"], found["setup"]
    about = ", ".join(setup["gpus"]) or "no GPU: small models on the CPU, which measure nothing"
    said = f"{about}; {machine['cpu']}, {machine['cores']} cores; commit {found['commit']}, {found['date']}."
    parts = [said]
    for title, (head, *rows) in found["tables"].items():
        ruler = ["---", *["---:"] * (len(head) - 1)]
        lines = [f"| {' | '.join(cells)} |" for cells in (head, ruler, *rows)]
        parts += [f"**{title}**", "\n".join(lines)]
    return "\n\n".join(parts)
