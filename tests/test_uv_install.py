"""Installation of a checkout's packages: by uv with pip's settings, and by pip where uv cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.uv_install import Command, commands, run_until_one_ends_well

WANTED = ["-r", "dev.txt"]
NO_FILES = {"PIP_CONFIG_FILE": "/dev/null"}


def test_uv_has_the_indexes_of_pip_and_comes_first(tmp_path: Path) -> None:
    by_uv, by_pip = commands(WANTED, NO_FILES | {"PIP_EXTRA_INDEX_URL": "https://packages.example/simple"}, tmp_path)
    assert Path(by_uv.argv[0]).name == "uv"
    assert by_uv.env["UV_INDEX"] == "https://packages.example/simple"
    assert by_pip.argv[1:3] == ["-m", "pip"]
    assert by_uv.argv[-2:] == by_pip.argv[-2:] == WANTED


def test_pip_does_what_uv_has_no_word_for(tmp_path: Path) -> None:
    (by_pip,) = commands(WANTED, NO_FILES | {"PIP_CONSTRAINT": "/etc/constraints.txt"}, tmp_path)
    assert by_pip.argv[1:3] == ["-m", "pip"]


def ends(code: int, said: str) -> Command:
    return Command([sys.executable, "-c", f"import sys; print({said!r}, file=sys.stderr); sys.exit({code})"], {})


def test_the_next_command_is_tried_and_why_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_until_one_ends_well([ends(1, "no such package"), ends(0, "installed")]) == 0
    said = capfd.readouterr().err
    assert "no such package" in said
    assert "installed" in said


def test_nothing_follows_a_command_that_ended_well(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_until_one_ends_well([ends(0, "installed"), ends(1, "tried, too")]) == 0
    assert "tried, too" not in capfd.readouterr().err


def test_the_last_command_s_code_counts() -> None:
    assert run_until_one_ends_well([ends(1, "no"), ends(3, "no")]) == 3
