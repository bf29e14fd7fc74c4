"""Claim: `fs --help` answers in less than 150 ms, and `fs deploy` of a function that has not changed in less than 1 s.

Whole processes, from their start to their end, in turn: `python -c pass` (what any command in Python costs on this
machine), `fs --help`, `fs ls`, `fs deploy` of an unchanged `hello` and, with its weights, of an unchanged `chat`.

Run: python -m tests.bench.cli [--json FILE] [--quick]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.bench.harness.samples import ROOT, Report, fine, median, parse_options, percentile, progress, spread
from tests.bench.harness.system import running

FS = str(Path(sys.executable).with_name("fs"))
HELP_MS, DEPLOY_MS = 150.0, 1000.0
BASELINE, HELP = "python -c pass", "fs --help"
DEPLOYS = {
    "fs deploy, hello unchanged": "examples/hello/handler.py",
    "fs deploy, chat unchanged": "examples/chat/handler.py",
}


def main() -> None:
    options = parse_options(__doc__, rounds=30, quick_rounds=2)
    report = Report(__doc__ or "")
    with running("python") as system:
        env = {**os.environ, "FS_HOME": str(system.home)}
        commands = {BASELINE: [sys.executable, "-c", "pass"], HELP: [FS, "--help"], "fs ls": [FS, "ls"]}
        commands |= {name: [FS, "deploy", str(ROOT / handler), "--no-probe"] for name, handler in DEPLOYS.items()}
        for handler in DEPLOYS.values():
            system.deploy(handler)
        took_ms: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(options.rounds + 1):
            progress(f"round {number} of {options.rounds}")
            for name, argv in commands.items():
                began_s = time.monotonic()
                subprocess.run(argv, env=env, check=True, capture_output=True, timeout=60)
                if number:  # the first round fills caches
                    took_ms[name].append((time.monotonic() - began_s) * 1000)
    report.samples = {"took_ms": took_ms}
    base = median(took_ms[BASELINE])
    rows = [["process, ms", "median (quartiles)", "90th percentile", f"ratio to `{BASELINE}`"]]
    for name, values in took_ms.items():
        rows.append([f"`{name}`", spread(values), fine(percentile(values, 0.9)), fine(median(values) / base)])
    report.tell("The command line", rows)
    slowest = max(median(took_ms[name]) for name in DEPLOYS)
    holds = median(took_ms[HELP]) < HELP_MS and slowest < DEPLOY_MS
    print(f"\nThe claim {'holds' if holds else 'does not hold'}: {median(took_ms[HELP]):.0f} ms and {slowest:.0f} ms.")
    report.save(options.json)


if __name__ == "__main__":
    main()
