"""Modules of a layer: which a worker has imported, and which are imported ahead."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fleetstart.runtime.worker.layer_imports import import_modules, imported_modules


class Late(ModuleType):
    """A module that loads itself when it is looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError("it was looked at")


def test_the_modules_inside_the_layer_are_told_in_their_order(tmp_path: Path) -> None:
    inside, outside, late = ModuleType("inside"), ModuleType("outside"), Late("late")
    inside.__file__, outside.__file__ = str(tmp_path / "inside.py"), f"{tmp_path}-other/outside.py"
    object.__getattribute__(late, "__dict__").update(__file__=str(tmp_path / "late.so"))
    loaded: dict[str, Any] = {"late": late, "outside": outside, "odd": None, "inside": inside}
    assert imported_modules(loaded, str(tmp_path)) == ["late", "inside"]


def test_only_modules_of_the_layer_are_imported_and_a_failing_one_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"fails": "raise SystemExit", "works": "X = 1", "missing_dependency": "import nowhere"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import_modules(["fails", "missing_dependency", "antigravity", "works.no", "works"], str(tmp_path))
    assert "works" in sys.modules
    assert "antigravity" not in sys.modules
    assert "fails" not in sys.modules
    monkeypatch.delitem(sys.modules, "works")
