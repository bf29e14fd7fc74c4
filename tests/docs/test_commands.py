"""The commands of the documentation work as they are printed: those of a page in order, against a system of its own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.controller.cli.system import FS, System
from tests.docs.pages import NAMES, ROOT, blocks

pytestmark = pytest.mark.e2e

AROUND = ("fs up", "fs down")
"""Done around each page. `test_blocks` holds their place, and checks `make`, `key=` and the like."""
KEY = "key=$(cat ~/.fleetstart/key)"
LIMIT_S = 150
"""Of one command: some wait for a cold start of torch, which a busy machine stretches."""
NEEDS = {"docs/recipes.md": ("onnxruntime", "skl2onnx", "skops", "xgboost")}
"""Modules that a page's scripts and handlers import, beside those that everything needs."""
SILENT = ("fs rm", "fs budget rm", "fs key revoke", "fs weights uploads", "python ")
"""Commands that print no data, or none where there is nothing to list."""


def _steps(page: str) -> list[tuple[str, str]]:
    """A path and what stands in it, or "" and a command."""
    steps: list[tuple[str, str]] = []
    for block in blocks(page, "sh", "python"):
        if block.file:
            steps.append((block.file, block.text))
        elif block.language == "sh" and not block.not_run:
            steps += [("", line) for line in block.commands if _is_run(line)]
    return steps if any(not kind for kind, _ in steps) else []


def _is_run(line: str) -> bool:
    return line.startswith(("fs ", "curl ", "python ")) and not line.startswith(AROUND)


PAGES = [name for name in NAMES if _steps(name)]


@pytest.mark.parametrize("page", PAGES)
def test_each_command_works_as_printed(page: str, tmp_path: Path) -> None:
    """One test a page, because a call needs the deploy that stands above it."""
    steps = _steps(page)
    for module in NEEDS.get(page, ()):
        pytest.importorskip(module)
    if not (ROOT / "examples/chat/weights/model.safetensors").exists():
        pytest.skip("no weights: make models")
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "examples").symlink_to(ROOT / "examples")
    needs_torch = any(name in text for _, text in steps for name in ("chat", "embed", "classify"))
    system = System(tmp_path / "home", profiles="python,torch" if needs_torch else "python")
    system.up(is_open=False)
    try:
        for kind, text in steps:
            if kind:
                (tmp_path / "work" / kind).parent.mkdir(exist_ok=True)
                (tmp_path / "work" / kind).write_text(text)
            else:
                _run(system, text, tmp_path / "work")
    finally:
        system.down()
    system.assert_gone()


def test_there_are_commands_of_both_kinds() -> None:
    lines = [text for page in PAGES for kind, text in _steps(page) if not kind]
    assert {line.split()[0] for line in lines} == {"fs", "curl", "python"}
    assert len(lines) > 80


def _run(system: System, line: str, folder: Path) -> None:
    env = {**os.environ, "FS_HOME": str(system.home), "PATH": f"{FS.parent}:{os.environ['PATH']}"}
    env.pop("FS_URL", None)
    command = line.replace("http://127.0.0.1:7433", system.url)
    command = command.replace("curl ", "curl --silent --show-error --fail-with-body ", 1)
    command = f"{KEY.replace('~/.fleetstart', shlex.quote(str(system.home)))}\n{command}"
    result = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, errors="replace", timeout=LIMIT_S
    )
    assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
    assert result.stdout.strip() or line.startswith(SILENT), line
    if line.startswith("curl") and "/fn/hello" in line and "respond-async" not in line:
        assert json.loads(result.stdout) == {"message": "Hello, Ada!"}
    if line.startswith("curl") and '"stream": true' in line:
        assert "data: [DONE]" in result.stdout
