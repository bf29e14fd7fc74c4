"""Every check and benchmark that needs a GPU, in one run of at most 40 minutes.

Each part is a process with a limit, so that one that hangs costs no other its time:

- checks: the tests marked `gpu`.
- load: segment → device, beside a copy of pinned memory and the loaders of others.
- cold: from a call to the first token of a Llama of 7.4 B parameters by phase, beside `vllm serve` and transformers.
- decode: tokens a second of 1, 8 and 64 requests together, beside vLLM.

It ends with 1 if a check failed or a part did not end well, with 2 where there is no GPU. `--device cpu --quick` runs
the same parts with small models on the CPU, and shows only that they run.

Run: python -m tests.bench.gpu [--device cpu] [--quick] [--only PART,...] [--json FILE] [--rounds N]
     [--peer-python PATH | --no-peer]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.gpu.machine import NO_GPU, about_gpus
from tests.bench.harness.samples import ROOT, Options, Report, parse_options, progress

LIMITS_S = {"checks": 480.0, "load": 420.0, "cold": 900.0, "decode": 540.0}
"""Longest time of each part: 39 minutes together."""
QUIT_S = 20.0
"""For a part that was told to end: its system goes down, and its files are removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a part left. `why_not`: why it has not ended well; empty if it has."""

    took_s: float
    why_not: str
    found: dict[str, Any]


def run_part(name: str, options: Options, limit_s: float) -> Ran:
    """Runs a part's module in a process group of its own; ends it after its limit."""
    with tempfile.TemporaryDirectory(prefix="fs-gpu-") as folder:
        found = Path(folder) / "found.json"
        argv = [sys.executable, "-m", f"tests.bench.gpu.{name}", "--json", str(found), *_arguments(options)]
        began_s = time.monotonic()
        process = subprocess.Popen(argv, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(limit_s)
            why_not = f"ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            why_not = f"not done after {limit_s:g} s"
        finally:
            _end(process)
        took_s = time.monotonic() - began_s
        whole = json.loads(found.read_text()) if found.exists() else {}
        return Ran(took_s=took_s, why_not=why_not, found=whole)


def _arguments(options: Options) -> list[str]:
    peers = ["--peer-python", str(options.peer_python)] if options.peer_python else ["--no-peer"]
    rounds = ["--rounds", str(options.rounds)] if options.rounds else []
    return ["--device", options.device, *(["--quick"] if options.quick else []), *rounds, *peers]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the part's processes: asked first, so that it removes what it made."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(QUIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(device="cuda")
    parser.add_argument("--only", default=",".join(LIMITS_S), metavar="PART,...", help=f"of {', '.join(LIMITS_S)}")


def main() -> None:
    options = parse_options(__doc__, rounds=0, quick_rounds=1, more=_add_options)
    chosen = options.extra["only"].split(",")
    if unknown := set(chosen) - set(LIMITS_S):
        sys.exit(f"no such part: {', '.join(sorted(unknown))}")
    gpus = about_gpus() if options.device == "cuda" else []
    if options.device == "cuda" and not gpus:
        print(NO_GPU, file=sys.stderr)
        sys.exit(2)
    report = Report("what needs a GPU works on one, and is as fast as it allows")
    report.setup = {"device": options.device, "gpus": gpus, "quick": options.quick, "parts": {}}
    for name in chosen:
        progress(f"── {name}, at most {LIMITS_S[name]:g} s")
        ran = run_part(name, options, LIMITS_S[name])
        report.tables |= ran.found.get("tables", {})
        report.samples[name] = ran.found.get("samples", {})
        about = {"took_s": round(ran.took_s, 1), "why_not": ran.why_not}
        report.setup["parts"][name] = ran.found.get("setup", {}) | about
    parts = report.setup["parts"].items()
    rows = [["part", "took, s", "ended"], *([n, f"{p['took_s']:.0f}", p["why_not"] or "well"] for n, p in parts)]
    report.tell("Parts", rows)
    report.save(options.json)
    sys.exit(1 if any(part["why_not"] for part in report.setup["parts"].values()) else 0)


if __name__ == "__main__":
    main()
