"""Packages that tests import late: collecting a file of tests imports none of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runner.late import late

FILE = """
from tests.runner.late import late

package = late("{package}")

def test_it(): ...
"""


class Collected:
    def __init__(self) -> None:
        self.count = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.count = len(session.items)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "large_package_of_a_test.py").write_text("value = 7")
    monkeypatch.syspath_prepend(tmp_path)
    yield "large_package_of_a_test"
    sys.modules.pop("large_package_of_a_test", None)


def test_a_package_is_imported_by_the_test_that_uses_it(package: str) -> None:
    found = late(package)
    assert not hasattr(found, "__wrapped__")
    assert package not in sys.modules
    assert found.value == 7


def test_pytest_imports_none_as_it_collects(package: str, tmp_path: Path) -> None:
    file = tmp_path / "test_of_a_large_package.py"
    file.write_text(FILE.format(package=package))
    collected = Collected()
    options = [
        str(file),
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:schemathesis",  # as in pyproject.toml: its import takes a second
        "--rootdir",
        str(tmp_path),
    ]
    assert pytest.main([*options, "-c", "/dev/null", "--import-mode=importlib"], plugins=[collected]) == 0
    assert collected.count == 1
    assert package not in sys.modules
