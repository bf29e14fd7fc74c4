"""Imports that a worker would not find are named, and no others."""

from __future__ import annotations

import ast
import textwrap

from fleetstart.controller.cli.packages.missing_imports import is_installed, missing_imports


def missing(files: dict[str, str], *, layer: tuple[str, ...] = ()) -> list[str]:
    sources = {name: ast.parse(textwrap.dedent(text)) for name, text in files.items()}
    found = missing_imports("handler.py", sources, layer, lambda name: name == "installed")
    return [f"{one.file}:{one.line} {one.module}" for one in found]


def test_what_is_in_the_bundle_the_layer_or_installed_is_no_warning() -> None:
    text = "import json\nimport installed\nimport mine\nimport sky.blue\nfrom fleetstart.runtime import function\n"
    assert missing({"handler.py": text + "import sea\n", "mine.py": ""}, layer=("sky",)) == ["handler.py:6 sea"]


def test_an_import_inside_a_function_counts() -> None:
    assert missing({"handler.py": "def f():\n    from sea.deep import fish\n"}) == ["handler.py:2 sea"]


def test_only_files_that_the_handler_leads_to_are_looked_at() -> None:
    files = {
        "handler.py": "from parts import one\n",
        "parts/__init__.py": "",
        "parts/one.py": "import sea\n",
        "parts/two.py": "import moon\n",
        "test_handler.py": "import sun\n",
    }
    assert missing(files) == ["parts/one.py:1 sea"]


def test_an_optional_import_and_one_for_type_checkers_are_no_warnings() -> None:
    text = """
    from typing import TYPE_CHECKING
    if TYPE_CHECKING:
        import sea
    try:
        import fast
    except ImportError:
        fast = None
    try:
        import slow
    except KeyError:
        pass
    """
    assert missing({"handler.py": text}) == ["handler.py:10 slow"]


def test_a_relative_import_is_of_the_bundle() -> None:
    assert missing({"handler.py": "from . import anything\n"}) == []


def test_a_name_that_is_no_module_is_not_installed() -> None:
    assert not is_installed("no_such_module_at_all")
    assert is_installed("msgspec")
