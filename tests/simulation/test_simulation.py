"""The simulation itself: a seed is a run, byte for byte."""

from __future__ import annotations

import subprocess
import sys


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


def test_the_same_seed_gives_the_same_trace_byte_for_byte() -> None:
    one, other = (simulate("--from", "11", "--seeds", "2", "--all", "--digest") for _ in range(2))
    digests = [line for line in one.stdout.splitlines() if line[0].isdigit()]
    assert len(digests) == 2, one.stderr
    assert len({line.split()[1] for line in digests}) == 2, "another seed is another run"
    assert digests == [line for line in other.stdout.splitlines() if line[0].isdigit()]
