"""Packages that a deploy installs for a declaration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetstart.controller.cli.commands.deploy import requirements_of
from fleetstart.controller.cli.handler.source.declarations import Declaration, Kind

TRANSFORMERS: dict[str, Any] = {"weights": "./w", "task": "embedding"}


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        ("function", {}, "beside\n"),
        ("function", {"requirements": ["own==1"]}, "own==1"),
        ("layered", {}, "beside\n"),
        ("llm", {}, None),
        ("transformers", TRANSFORMERS, None),
        ("transformers", TRANSFORMERS | {"requirements": ["transformers==5.23.0"]}, "transformers==5.23.0"),
    ],
)
def test_a_model_without_code_has_the_packages_of_its_setting_and_of_no_file(
    tmp_path: Path, kind: Kind, settings: dict[str, Any], text: str | None
) -> None:
    (tmp_path / "requirements.txt").write_text("beside\n")
    found = requirements_of(Declaration(attribute="f", kind=kind, line=1, settings=settings), tmp_path)
    assert (None if found is None else found.text.strip()) == (None if text is None else text.strip())
