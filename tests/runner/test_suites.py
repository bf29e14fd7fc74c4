"""Second runs of failed tests, shown by runs of pytest over a few tests made for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runner.suites import FLAKY_MOST, failed_tests, run_all

ALWAYS = "def test_fails(): assert False\n"
ONCE = """
from pathlib import Path

def test_fails_once():
    mark = Path(__file__).with_suffix(".ran")
    ran, _ = mark.exists(), mark.touch()
    assert ran
"""
SUITES = (["test_one.py"], ["test_two.py"])


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of pytest without plugins, which take most of their time to import."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def outcome(folder: Path, one: str, two: str, *, second_run: bool = True, options: tuple[str, ...] = ()) -> int:
    (folder / "test_one.py").write_text(one)
    (folder / "test_two.py").write_text(two)
    return run_all(folder, SUITES, second_run=second_run, options=options)


def test_a_test_that_passes_when_it_runs_again_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert outcome(tmp_path, ONCE, "def test_passes(): ...\n") == 0
    assert "FLAKY: test_one.py::test_fails_once failed" in capfd.readouterr().out


def test_the_second_suite_runs_when_the_first_one_failed(tmp_path: Path) -> None:
    assert outcome(tmp_path, ALWAYS, ALWAYS, second_run=False) == 1
    assert failed_tests(tmp_path / ".pytest_cache") == ["test_one.py::test_fails", "test_two.py::test_fails"]


def test_a_test_that_fails_again_fails_the_run(tmp_path: Path) -> None:
    assert outcome(tmp_path, ONCE, ALWAYS) == 1


def test_many_failures_are_not_tried_again(tmp_path: Path) -> None:
    many = "".join(ONCE.replace("fails_once", f"{n}").replace(".ran", f".ran{n}") for n in range(FLAKY_MOST + 1))
    assert outcome(tmp_path, many, "def test_passes(): ...\n") == 1


def test_a_run_that_broke_off_fails_whatever_the_others_did(tmp_path: Path) -> None:
    assert outcome(tmp_path, "import os\ndef test_ends(): os._exit(9)\n", ONCE) == 9
    assert outcome(tmp_path, "def not_a_test(): ...\n", "def test_passes(): ...\n") == 5


def test_the_second_run_has_the_options_of_the_first(tmp_path: Path) -> None:
    assert outcome(tmp_path, ONCE + ALWAYS, "def test_passes(): ...\n", options=("-k", "fails_once or passes")) == 0


def test_without_a_second_run_one_failure_is_enough(tmp_path: Path) -> None:
    """And what failed before is not what fails now."""
    assert outcome(tmp_path, ONCE, "def test_passes(): ...\n", second_run=False) == 1
    assert outcome(tmp_path, ONCE, "def test_passes(): ...\n", second_run=False) == 0
