"""`make gpu`: without a GPU it says what it takes, every test that needs one is in it, and its parts run on the CPU.

The figures are not judged here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.gpu import checks
from tests.bench.gpu.__main__ import LIMITS_S, run_part
from tests.bench.gpu.machine import NO_GPU
from tests.bench.harness.samples import ROOT, Options
from tests.docs.gpu_results import tables

MARKED = "mark.gpu"
WHOLE_S = 40 * 60


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tests.bench.gpu", "--no-peer", *options]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=290, env=environment)


def test_every_file_with_a_test_for_gpus_is_in_it() -> None:
    found = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARKED in path.read_text()]
    named = sorted(checks.FILES + checks.CONTAINER_FILES)
    assert [str(path.relative_to(ROOT)) for path in found if path != Path(__file__)] == named


def test_its_parts_fit_forty_minutes() -> None:
    assert sum(LIMITS_S.values()) <= WHOLE_S
    for name in LIMITS_S:
        assert (ROOT / f"tests/bench/gpu/{name}.py").exists()


def test_outcomes_are_read_from_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.a.test_x" name="test_good"/>'
        '<testcase classname="tests.a.test_x" name="test_bad"><failure message="no &#10;more">text</failure></testcase>'
        '<testcase classname="tests.a.test_x" name="test_idle"><skipped message="needs a CUDA device"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert checks.outcomes(report) == {
        "test_x: good": "passed",
        "test_x: bad": "failed: no ",
        "test_x: idle": "skipped: needs a CUDA device",
    }


def test_tables_of_a_run_stand_under_their_titles() -> None:
    found: dict[str, Any] = {
        "machine": {"cpu": "a CPU", "cores": 16},
        "setup": {"gpus": ["a GPU, 80 GB"]},
        "commit": "0123abcd",
        "date": "2026-11-25",
        "tables": {"Load": [["loader", "s"], ["fleetstart", "0.50"]]},
    }
    assert tables(found) == (
        "a GPU, 80 GB; a CPU, 16 cores; commit 0123abcd, 2026-11-25.\n\n**Load**\n\n"
        "| loader | s |\n| --- | ---: |\n| fleetstart | 0.50 |"
    )


@pytest.mark.e2e
def test_without_a_gpu_it_ends_with_two_and_what_it_takes() -> None:
    ended = bench()
    assert ended.returncode == 2
    assert NO_GPU in ended.stderr


@pytest.mark.e2e
def test_a_part_that_takes_too_long_is_ended_and_named() -> None:
    options = Options(json=None, quick=True, peer_python=None, rounds=1, device="cpu", extra={})
    ran = run_part("load", options, 0.05)
    assert ran.why_not == "not done after 0.05 s"
    assert ran.found == {}


@pytest.mark.e2e
@pytest.mark.parametrize("part", LIMITS_S)
def test_it_runs_on_the_cpu(part: str, tmp_path: Path) -> None:
    if part == "cold" and not (ROOT / "examples/chat/weights/config.json").exists():
        pytest.skip("no weights: make models")
    found = tmp_path / "found.json"
    ended = bench("--device", "cpu", "--quick", "--only", part, "--json", str(found))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    whole = json.loads(found.read_text())
    assert list(whole["tables"])[-1] == "Parts"
    assert len(whole["tables"]) > 1
    assert whole["setup"]["parts"][part]["why_not"] == ""
