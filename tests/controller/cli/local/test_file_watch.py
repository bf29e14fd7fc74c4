"""When `fs dev` deploys again: once for each change, when it is over."""

from __future__ import annotations

import os
from pathlib import Path

from fleetstart.controller.cli.local.file_watch import ChangeDetector, file_stamps


def test_a_change_is_told_of_once_and_only_when_it_has_settled() -> None:
    saves = ChangeDetector({"a": (1, 1)})
    assert not saves.changed({"a": (1, 1)})
    assert not saves.changed({"a": (2, 0)}), "an editor may still be writing"
    assert not saves.changed({"a": (3, 5)})
    assert saves.changed({"a": (3, 5)})
    assert not saves.changed({"a": (3, 5)})
    assert not saves.changed({"a": (4, 5)})
    assert not saves.changed({"a": (3, 5)}), "undone before anybody looked"


def test_what_counts_is_what_a_function_is_made_of(tmp_path: Path) -> None:
    for name in (
        "handler.py",
        "fs.toml",
        "data.json",
        "notes.txt",
        "uv.lock",
        "sub/requirements.txt",
        ".hidden.py",
        "sub/part.py",
        "venv/lib.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    found = {os.path.relpath(path, tmp_path) for path in file_stamps(tmp_path, ["data.json", "gone.json"])}
    assert found == {"handler.py", "fs.toml", "data.json", "sub/part.py", "uv.lock"}
    before = file_stamps(tmp_path)
    (tmp_path / "handler.py").unlink()
    assert file_stamps(tmp_path) != before
