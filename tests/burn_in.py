"""Burn-in: runs a suite again and again beside programs that burn all cores, and counts the failures of each test.

    python -m tests.burn_in [--rounds N] [--burners N] [--jobs N] [PYTEST ARGUMENT...]

A test that waits for something by the clock, or that has a race, passes on an idle machine and fails here. Ends with 1
if any test failed in any round; a test's first failure is printed whole.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from tests.servers import end, spawn

BURN = "while True: pass"


@contextlib.contextmanager
def burning(count: int) -> Iterator[None]:
    """Runs so many processes that compute without end."""
    processes = [spawn([sys.executable, "-ISE", "-c", BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            end(process)


def failures_in(report: Path) -> dict[str, str]:
    """Tests that failed or were in error, with what pytest said of each."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        for bad in (*case.findall("failure"), *case.findall("error")):
            found[f"{case.get('classname')}::{case.get('name')}"] = bad.text or bad.get("message") or ""
    return found


def run_suite(arguments: list[str], jobs: int) -> dict[str, str]:
    """One round: its failures."""
    with tempfile.TemporaryDirectory(prefix="fs-burn-in-") as folder:
        report = Path(folder) / "report.xml"
        options = [
            "--quiet",
            "-r",
            "",
            "-p",
            "no:cacheprovider",
            f"--junit-xml={report}",
            *(["-n", str(jobs)] if jobs else []),
        ]
        done = subprocess.run([sys.executable, "-m", "pytest", *options, *arguments], capture_output=True, text=True)
        if done.returncode not in (0, 1):
            sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return failures_in(report)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.burn_in", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--burners", type=int, default=os.cpu_count() or 1, help="programs that burn a core; default: one a core"
    )
    parser.add_argument("--jobs", type=int, default=0, help="tests at a time (pytest -n); default: one")
    options, arguments = parser.parse_known_args()
    failures: collections.Counter[str] = collections.Counter()
    with burning(options.burners):
        for number in range(1, options.rounds + 1):
            began_s = time.monotonic()
            found = run_suite(arguments, options.jobs)
            for name in sorted(found.keys() - failures.keys()):
                print(f"── {name}, in round {number}\n{found[name]}")
            failures.update(found.keys())
            print(
                f"round {number} of {options.rounds}: {len(found)} failed, {time.monotonic() - began_s:.0f} s",
                flush=True,
            )
    for name, count in failures.most_common():
        print(f"{count} of {options.rounds} rounds  {name}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
