"""Pre-forked workers: the outcomes of one process, whatever ends a worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FIRST = """
import os
from pathlib import Path

import pytest

@pytest.fixture(scope="module")
def once(request):
    with Path(__file__).with_name("set up").open("a") as file:
        file.write("x")

def test_passes(once): ...
def test_uses_it_again(once): ...
def test_fails(once):
    print("said before it failed")
    assert 1 == 2
@pytest.mark.skip(reason="for a reason")
def test_is_skipped(): ...
@pytest.mark.xfail(strict=True)
def test_is_expected_to_fail(): assert False
"""
SECOND = """
import os
import signal

def test_before(): ...
def test_ends_its_process(): os.kill(os.getpid(), signal.SIGKILL)
def test_after(): ...
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_first.py").write_text(FIRST)
    (folder / "test_second.py").write_text(SECOND)
    arguments = [
        *options,
        "-q",
        "-ra",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        "-p",
        "no:cacheprovider",
        str(folder),
    ]
    command = [sys.executable, "-m", "pytest", "-p", "tests.runner.prefork", *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


def test_outcomes_are_those_of_one_process_and_one_that_dies_fails_its_test_alone(tmp_path: Path) -> None:
    ended = run(tmp_path, "--prefork", "2")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    progress = ended.stdout.split()[0]
    assert sorted(progress) == sorted("....FFsx")
    assert "2 failed, 4 passed, 1 skipped, 1 xfailed" in ended.stdout
    assert "for a reason" in ended.stdout
    assert "said before it failed" in ended.stdout
    assert "test_second.py::test_ends_its_process" in ended.stdout
    assert "ended in the midst of it (exit code -9)" in ended.stdout
    assert (tmp_path / "set up").read_text() == "x"


def test_the_first_failure_ends_it_where_that_is_asked_for(tmp_path: Path) -> None:
    ended = run(tmp_path, "--prefork", "1", "-x")
    assert ended.returncode == 1
    assert "1 failed, 2 passed" in ended.stdout
    assert "stopping after 1 failures" in ended.stdout
