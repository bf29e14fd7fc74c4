"""A minute of chaos on a real system: two controllers, two nodes, every kind of fault that fits, and no finding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.bed, pytest.mark.timeout(300)]

SEED = 28
"""Its first fault is the end of a gateway: what that left open is booked 30 s later, which is when the run is over."""
SECONDS = 28
SCALE = 0.5
"""Faults of half the usual length, so that more of them fit; those of `make chaos` are all beyond the leases."""


def test_half_a_minute_of_faults_breaks_no_promise(tmp_path: Path) -> None:
    options = f"--seconds {SECONDS} --scale {SCALE} --seed {SEED} --keep {tmp_path}"
    argv = [sys.executable, "-m", "tests.chaos", *options.split()]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing found" in done.stdout
