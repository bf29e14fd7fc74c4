"""Where a layer's packages stand on a worker's import path, and what it forgets of the platform's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fleetstart.runtime.worker.layer_path import position, stale_modules


def test_a_layer_stands_after_the_standard_library_and_before_the_packages_of_the_node() -> None:
    assert position(["/tmp/function", "/usr/lib/python3.11", "/venv/site-packages", "/x"]) == 2
    assert position(["/tmp/function", "/usr/lib/python3/dist-packages"]) == 1
    assert position(["/tmp/function"]) == 1


def test_only_modules_that_the_layer_has_are_forgotten_and_none_of_the_standard_library() -> None:
    loaded = ["starlette", "starlette.routing", "starlette_more", "json", "msgspec"]
    assert stale_modules(loaded, frozenset({"starlette", "json"})) == ["starlette", "starlette.routing"]


def test_a_worker_imports_the_version_of_its_layer_though_the_platforms_is_loaded(tmp_path: Path) -> None:
    for name in ("starlette", "msgspec"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("__version__ = 'of the layer'\n")
    script = (
        "import starlette.applications, msgspec; from fleetstart.runtime.worker.layer_path import add_layer; "
        f"add_layer({str(tmp_path)!r}); import starlette, msgspec; "
        "print(starlette.__version__, hasattr(msgspec, 'json'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "of the layer True"
