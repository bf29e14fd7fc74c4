"""Smoke tests of the benchmarks: each runs and writes its tables. The figures are not judged here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.containers.engine import why_none
from tests.testbed import why_not

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SCRIPTS = (
    "gateway",
    "node_links",
    "overload",
    "cli",
    "wakeup",
    "layers",
    "chat",
    "engine",
    "weights",
    "planner",
    "control_plane",
    "isolation",
    "peer_pull",
    "multicast",
    "coldstart",
)
ON_A_BED = ("coldstart", "multicast")
LONGEST_FIRST = tuple(dict.fromkeys(("coldstart", "chat", "isolation", *SCRIPTS)))
PART = os.environ.get("BENCHMARKS_PART", "0/1")
"""The part of these that is run, as "1/3": every third from the second on, for runs that take turns."""


def part_of(names: tuple[str, ...], part: str) -> tuple[str, ...]:
    number, parts = map(int, part.split("/"))
    return names[number::parts]


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_have_every_script_once(parts: int) -> None:
    found = [name for number in range(parts) for name in part_of(LONGEST_FIRST, f"{number}/{parts}")]
    assert sorted(found) == sorted(SCRIPTS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", part_of(LONGEST_FIRST, PART))
def test_it_runs(name: str, tmp_path: Path) -> None:
    if name in ON_A_BED and (reason := why_not()):
        pytest.skip(f"no test bed: {reason}")
    if name == "isolation" and (lacking := why_none() or ("" if shutil.which("runsc") else "runsc is not installed")):
        pytest.skip(lacking)
    if not (ROOT / "examples/chat/weights/model.safetensors").exists():
        pytest.skip("no weights: make models")
    found = tmp_path / "found.json"
    options = ["--quick", "--rounds", "1", "--no-peer", "--json", str(found)]
    argv = [sys.executable, "-m", f"tests.bench.{name}", *options]
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=290)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(found.read_text())["tables"]
    assert "| --- |" in result.stdout


def test_releases_are_compared_in_turn(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    options = ["--before", ".", "--after", ".", "--quick", "--rounds", "1", "--no-peer", "--only", "gateway,hello"]
    argv = [sys.executable, "-m", "tests.bench.releases", *options, "--json", str(found)]
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=290)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "| hello wakes from zero |" in result.stdout


def test_make_bench_runs_them_all() -> None:
    said = subprocess.run(["make", "--dry-run", "bench"], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert f"for name in {' '.join(SCRIPTS)};" in said.stdout
    for name in SCRIPTS:
        assert (ROOT / "docs" / "measurements" / f"{name}.json").exists()
