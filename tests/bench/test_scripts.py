"""Each benchmark still runs, and says what it found; what it found is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SCRIPTS = ("gateway", "wakeup", "chat", "engine", "weights")


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    if not (ROOT / "examples/chat/weights/model.safetensors").exists():
        pytest.skip("no weights: make models")
    found = tmp_path / "found.json"
    options = ["--quick", "--rounds", "1", "--no-peer", "--json", str(found)]
    result = subprocess.run(
        [sys.executable, "-m", f"tests.bench.{name}", *options], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(found.read_text())["tables"]
    assert "| --- |" in result.stdout


def test_make_bench_runs_them_all() -> None:
    said = subprocess.run(["make", "--dry-run", "bench"], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert f"for name in {' '.join(SCRIPTS)};" in said.stdout
    for name in SCRIPTS:
        assert (ROOT / "docs" / "measurements" / f"{name}.json").exists()
