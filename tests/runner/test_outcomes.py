"""The outcomes that conftest adds to pytest's, shown by runs of pytest over a few tests made for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from tests.runner import outcomes

ROOT = Path(__file__).parents[2]

SKIPS = """
import pytest

def test_waits_for_a_program():
    pytest.skip("no chromium")

@pytest.mark.skipif(True, reason="needs a CUDA device")
def test_waits_for_a_gpu(): ...

@pytest.mark.xfail(reason="known")
def test_is_expected_to_fail():
    assert False
"""
QUICK = """
import os, subprocess, threading
import pytest

@pytest.fixture(scope="module")
def server():
    subprocess.run(["true"])

def test_starts_one():
    subprocess.run(["true"])

def test_forks():
    if os.fork() == 0:
        os._exit(0)

def test_has_one_by_a_fixture(server): ...

def test_has_the_same_one(server): ...

def test_starts_one_in_a_thread_and_holds_all_errors():
    def run():
        try:
            subprocess.run(["true"])
        except BaseException:
            pass
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

def test_reads_the_weights_of_an_example(tmp_path):
    folder = tmp_path / "examples" / "chat" / "weights"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")

def test_starts_none(): ...

def test_fails():
    assert False
"""


def outcomes_of(folder: Path, source: str, *options: str, ci: bool = False) -> dict[str, int]:
    """Counts of each outcome, from the last line that pytest prints."""
    (folder / "test_made.py").write_text(source)
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "--rootdir",
        str(folder),
        "-c",
        os.devnull,
        *options,
    ]
    env = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*argv, str(folder)],
        cwd=ROOT,
        env=env | ({"CI": "true"} if ci else {}),
        capture_output=True,
        text=True,
        timeout=110,
    )
    last = done.stdout.splitlines()[-1]
    return {name: int(count) for count, name in re.findall(r"(\d+) (left out|\w+)", last.split(" in ")[0])}


def test_a_skip_stays_one_on_a_users_machine(tmp_path: Path) -> None:
    assert outcomes_of(tmp_path, SKIPS) == {"skipped": 2, "xfailed": 1}


def test_a_skip_in_ci_fails_unless_its_reason_is_allowed(tmp_path: Path) -> None:
    assert outcomes_of(tmp_path, SKIPS, ci=True) == {"failed": 1, "skipped": 1, "xfailed": 1}


def test_a_module_that_is_skipped_in_ci_is_an_error(tmp_path: Path) -> None:
    source = "import pytest\npytest.importorskip('no_such_package')\ndef test(): ...\n"
    assert outcomes_of(tmp_path, source, ci=True) == {"error": 1}


@pytest.mark.parametrize("ci", [False, True])
def test_what_starts_processes_or_reads_real_weights_is_not_quick(tmp_path: Path, ci: bool) -> None:
    found = outcomes_of(tmp_path, QUICK, "--quick", ci=ci)
    assert found == {"left out": 6, "passed": 1, "failed": 1}


@pytest.mark.parametrize(("computed_s", "outcome"), [(0.1, "passed"), (outcomes.TOO_SLOW_S + 0.1, "failed")])
def test_a_quick_test_that_computes_for_long_fails(computed_s: float, outcome: Literal["passed", "failed"]) -> None:
    report = pytest.TestReport(
        "t", ("t", 0, "t"), {}, "passed", None, "call", user_properties=[(outcomes.COMPUTED, computed_s)]
    )
    outcomes.fail_slow(report)
    assert report.outcome == outcome
    assert outcome == "passed" or "mark it" in str(report.longrepr)


def test_they_run_otherwise(tmp_path: Path) -> None:
    assert outcomes_of(tmp_path, QUICK) == {"passed": 7, "failed": 1}
