"""Options, statistics and report of every benchmark: medians and spreads, the machine, tables, raw samples as JSON.

Figures of one machine on one day mean little by themselves: each script measures its baseline in the same run,
interleaved, and says the ratio.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    json: Path | None
    quick: bool
    peer_python: Path | None
    """A Python that has the peer installed. None: no peer, and the output says so."""
    rounds: int
    device: str
    extra: dict[str, Any]
    """What one script takes beside what all take."""


def parse_options(
    doc: str | None, *, rounds: int, quick_rounds: int, more: Callable[[argparse.ArgumentParser], None] | None = None
) -> Options:
    """Options that every script takes; `more` adds those of one script."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write raw samples there")
    parser.add_argument("--quick", action="store_true", help="few repetitions: shows that it works, measures little")
    parser.add_argument("--rounds", type=int, help=f"default {rounds}, {quick_rounds} with --quick")
    parser.add_argument("--peer-python", type=Path, default=ROOT / ".venv-peer/bin/python", metavar="PATH")
    parser.add_argument("--no-peer", action="store_true", help="leave the peer out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where models run, if it matters")
    if more is not None:
        more(parser)
    given = parser.parse_args()
    extra = {name: value for name, value in vars(given).items() if name not in Options.__dataclass_fields__}
    peer_python = None if given.no_peer else given.peer_python
    if peer_python is not None and not peer_python.exists():
        parser.error(f"{peer_python} does not exist: `make bench` makes it, or use --no-peer")
    chosen = given.rounds or (quick_rounds if given.quick else rounds)
    return Options(
        json=given.json, quick=given.quick, peer_python=peer_python, rounds=chosen, device=given.device, extra=extra
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest ranks."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """ "median (quartile to quartile)"."""
    return f"{fine(median(values))} ({fine(percentile(values, 0.25))} to {fine(percentile(values, 0.75))})"


def fine(value: float) -> str:
    """Three digits that matter, no more than two decimals."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


class CpuTimes(NamedTuple):
    """CPU times in the kernel's ticks."""

    busy: int
    stolen: int


@dataclass(slots=True)
class Report:
    """Collects the samples of one run; `tell` prints a table, `save` writes everything."""

    claim: str
    begun: CpuTimes = field(default_factory=lambda: cpu_times())
    setup: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)

    def tell(self, title: str, rows: list[list[str]]) -> None:
        """A Markdown table; the first row is its head."""
        self.tables[title] = rows
        print(f"\n{title}\n")
        for number, row in enumerate(rows):
            print("| " + " | ".join(row) + " |")
            if number == 0:
                print("| " + " | ".join("---" if column == 0 else "---:" for column in range(len(row))) + " |")
        sys.stdout.flush()

    def save(self, path: Path | None) -> None:
        stolen = stolen_share(self.begun, cpu_times())
        print(
            f"\nWhile this ran, other machines on the host had {stolen:.0%} of the time that our cores wanted to work."
        )
        if path is None:
            return
        whole = {
            "claim": self.claim,
            "setup": self.setup,
            "machine": {**machine(), "stolen_share": round(stolen, 3)},
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "tables": self.tables,
            "samples": _rounded(self.samples),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(whole, separators=(",", ":")) + "\n")


def machine() -> dict[str, Any]:
    model = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory_kib = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def cpu_times() -> CpuTimes:
    """CPU times of all cores since boot."""
    fields = [int(field) for field in _lines("/proc/stat")[0].split()[1:9]]
    return CpuTimes(busy=sum(fields) - fields[3] - fields[4] - fields[7], stolen=fields[7])


def stolen_share(begun: CpuTimes, ended: CpuTimes) -> float:
    """Share of the cores' time that the hypervisor gave to others: above some percent, run the benchmark again."""
    stolen, busy = ended.stolen - begun.stolen, ended.busy - begun.busy
    return stolen / max(1, stolen + busy)


def commit() -> str:
    """The commit, with "-dirty" if anything but the measurements themselves differs from it."""
    head = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", ":!docs/measurements")
    return f"{head or 'unknown'}{'-dirty' if changed else ''}"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
