"""`fs image build`: what its errors advise."""

from __future__ import annotations

import errno
from typing import Any, NoReturn

import pytest

from fleetstart.controller.cli.commands import image
from fleetstart.controller.cli.output import FAILED
from fleetstart.controller.cli.root import run


class Engine:
    """An engine that is never asked."""

    def close(self) -> None:
        """Has nothing open."""


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOSPC, "set TMPDIR to a disk with room"), (errno.ENOENT, "was one of them changed")]
)
def test_a_full_folder_for_temporary_files_is_no_change_of_a_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, advice: str
) -> None:
    def build(*arguments: Any, **options: Any) -> NoReturn:
        raise OSError(number, "it failed")

    monkeypatch.setattr("fleetstart.images.builder.build", build)
    monkeypatch.setattr(image, "_engine", lambda address: Engine())
    assert run(["image", "build", "controller"]) == FAILED
    assert advice in capsys.readouterr().err
