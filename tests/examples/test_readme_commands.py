"""The commands of the README work as they are printed: each is run, in order, against one real system."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controller.cli.system import FS, System

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
LINES = [line.strip() for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
# As a shell goes on knowing it.
KEY = next(line.partition("#")[0].strip() for line in LINES if line.startswith("key="))
# What starts and stops the system is done around the test, and `make` has its own.
RUN = [line for line in LINES if line.startswith(("fs ", "curl ")) and line.split()[1] not in ("up", "down")]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tmp_path_factory.mktemp("readme") / "home", profiles="python,torch")
    system.up(is_open=False)
    try:
        yield system
    finally:
        system.down()
    system.assert_gone()


def test_there_are_commands_of_both_kinds() -> None:
    assert {line.split()[0] for line in RUN} == {"fs", "curl"}


def test_each_command_works_as_printed(system: System) -> None:
    """One test, because a call needs the deploy that stands above it."""
    if not (ROOT / "examples/chat/weights/model.safetensors").exists():
        pytest.skip("no weights: make models")
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    env = {**os.environ, "FS_HOME": str(system.home), "PATH": f"{FS.parent}:{os.environ['PATH']}"}
    env.pop("FS_URL", None)
    for line in RUN:
        command = line.replace("http://127.0.0.1:7433", system.url).replace(
            "curl ", "curl --silent --show-error --fail-with-body "
        )
        command = f"{KEY.replace('~/.fleetstart', shlex.quote(str(system.home)))}\n{command}"
        result = subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
        assert result.stdout.strip(), line
        if line.startswith("curl") and "/fn/hello" in line:
            assert json.loads(result.stdout) == {"message": "Hello, Ada!"}
        if line.startswith("curl") and "stream" in line:
            assert "data: [DONE]" in result.stdout
