"""The owner's key file: made once, whoever is quicker, and made anew where it is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetstart.controller.auth import owner_key_file
from fleetstart.controller.auth.api_key import new_key_text
from fleetstart.controller.auth.owner_key_file import load_or_create, read_key_file, write_key_file


@pytest.mark.parametrize("before", [None, "", "damaged"])
def test_a_key_that_another_process_makes_meanwhile_stays(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be registered already: taken away, nobody would have a key."""
    path, theirs = tmp_path / "key", new_key_text()
    if before is not None:
        path.write_text(before)

    def read(path: Path) -> str:
        monkeypatch.undo()
        text = read_key_file(path)
        write_key_file(path, theirs.text)
        return text

    monkeypatch.setattr(owner_key_file, "read_key_file", read)
    assert load_or_create(path).id == theirs.id
    assert path.read_text().strip() == theirs.text
    assert [file.name for file in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize("before", [None, "", "damaged"])
def test_a_key_is_made_where_none_can_be_read_and_kept_then(before: str | None, tmp_path: Path) -> None:
    path = tmp_path / "key"
    if before is not None:
        path.write_text(before)
    made = load_or_create(path)
    assert load_or_create(path) == made
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["key"]
