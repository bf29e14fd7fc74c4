"""Smoke tests of the benchmarks: each runs and writes its tables. The figures are not judged here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SCRIPTS = ("gateway", "overload", "cli", "wakeup", "chat", "engine", "weights", "planner", "isolation")
ON_A_BED = ("coldstart",)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    if name == "isolation" and shutil.which("runsc") is None:
        pytest.skip("runsc (gVisor) is not installed")
    run(name, tmp_path / "found.json", timeout_s=190)


def run(name: str, found: Path, *, timeout_s: float) -> None:
    if not (ROOT / "examples/chat/weights/model.safetensors").exists():
        pytest.skip("no weights: make models")
    options = ["--quick", "--rounds", "1", "--no-peer", "--json", str(found)]
    argv = [sys.executable, "-m", f"tests.bench.{name}", *options]
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(found.read_text())["tables"]
    assert "| --- |" in result.stdout


def test_make_bench_runs_them_all() -> None:
    said = subprocess.run(["make", "--dry-run", "bench"], cwd=ROOT, capture_output=True, text=True, timeout=20)
    names = (*SCRIPTS, *ON_A_BED)
    assert f"for name in {' '.join(names)};" in said.stdout
    for name in names:
        assert (ROOT / "docs" / "measurements" / f"{name}.json").exists()
