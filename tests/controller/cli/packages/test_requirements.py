"""Requirements are found where they are written, and change their digest when anything they depend on changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetstart.controller.cli.packages.requirements import find_requirements
from fleetstart.runtime.contract.errors import InvalidSpec

LOCK, PROJECT = 'lock-version = "1.0"\n', '[project]\nname = "x"\nversion = "1"\ndependencies = ["six"]\n'


def kind(folder: Path, setting: Any = None) -> str | None:
    found = find_requirements(setting, "greet", folder)
    return found.origin if found is not None else None


def test_the_setting_wins_over_files_and_the_more_exact_file_over_others(tmp_path: Path) -> None:
    assert kind(tmp_path) is None
    for name, text in (
        ("pyproject.toml", PROJECT),
        ("requirements.txt", "six\n"),
        ("uv.lock", "version = 1\n"),
        ("pylock.toml", LOCK),
    ):
        (tmp_path / name).write_text(text)
        assert kind(tmp_path) == name
    assert kind(tmp_path, ["six==1.16"]) == "requirements of greet"
    assert kind(tmp_path, "requirements.txt") == "requirements.txt"
    assert kind(tmp_path, []) is None


def test_a_project_without_dependencies_and_an_empty_list_need_nothing(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\n")
    (tmp_path / "requirements.txt").write_text("\n# nothing yet\n")
    assert kind(tmp_path) is None


@pytest.mark.parametrize("setting", ["no.txt", 5, [5], [""], ["-r other.txt"], ["six\nsix"], {"six": "1"}])
def test_what_is_no_list_of_packages_is_refused(tmp_path: Path, setting: Any) -> None:
    with pytest.raises(InvalidSpec, match="requirements"):
        find_requirements(setting, "greet", tmp_path)


def test_a_file_that_is_included_is_part_of_the_digest(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("-r base.txt\nsix\n")
    digests = set()
    for text in ("attrs\n", "attrs==25.1\n"):
        (tmp_path / "base.txt").write_text(text)
        found = find_requirements(None, "greet", tmp_path)
        assert found is not None
        digests |= {found.digest(), found.digest("other python")}
    assert len(digests) == 4


def test_files_that_include_each_other_end(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("-r base.txt\nsix\n")
    (tmp_path / "base.txt").write_text("-r requirements.txt\n-c missing.txt\n")
    assert kind(tmp_path) == "requirements.txt"
