"""Room on the disk of FS_HOME, and the error of a start that failed without."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetstart.controller.cli.commands.up import wait_ready
from fleetstart.controller.cli.home import HomeLayout
from fleetstart.controller.cli.local.disk_room import lack_of_room
from fleetstart.runtime.contract.errors import StartFailed
from fleetstart.runtime.contract.sizes import GIB


def disk(free_bytes: int, *, files: int = 1000, free_files: int = 10) -> SimpleNamespace:
    block = 4096
    return SimpleNamespace(
        f_bavail=free_bytes // block, f_frsize=block, f_blocks=GIB // block, f_files=files, f_favail=free_files
    )


@pytest.mark.parametrize(
    ("found", "lack"),
    [
        (disk(GIB), ""),
        (disk(GIB, files=0, free_files=0), ""),
        (disk(0), "the disk of {folder} has 0 B of 1.0 GiB free, and a start takes up to 16.0 MiB"),
        (disk(GIB, free_files=0), "the disk of {folder} has room for no more files: all 1,000 are taken"),
    ],
)
def test_what_a_disk_lacks_is_named_with_its_folder(
    found: SimpleNamespace, lack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda folder: found)
    assert lack_of_room(tmp_path) == lack.format(folder=tmp_path)


def test_a_start_that_fails_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said that the supervisor had ended, and named logs in which there was nothing."""
    monkeypatch.setattr(os, "statvfs", lambda folder: disk(8192))
    ended = SimpleNamespace(poll=lambda: 1, returncode=1)
    layout = HomeLayout(tmp_path)
    layout.create()
    with pytest.raises(
        StartFailed, match=r"ended with status 1: the disk of .* has 8\.0 KiB of 1\.0 GiB free"
    ) as failed:
        wait_ready(layout, ended)  # type: ignore[arg-type]
    assert "FS_HOME" in failed.value.hint
