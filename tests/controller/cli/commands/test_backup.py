"""`fs backup` and `fs restore` of a system with a Redis of its own: running, stopped, and lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controller.cli.system import System

pytestmark = pytest.mark.e2e


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    system = System(tmp_path / "home")
    try:
        yield system
    finally:
        system.down()
        system.assert_gone()


def test_a_lost_redis_comes_back_from_a_file(system: System, tmp_path: Path) -> None:
    file, nothing = tmp_path / "b", system.fs("backup", tmp_path / "b", "--json", code=3)
    assert "there is no system" in json.loads(nothing.stderr)["error"]["message"]
    system.up(is_open=False)
    system.fs("secret", "set", "TOKEN", stdin="canary")
    system.fs("deploy", "examples/hello/handler.py", "--no-probe")
    assert "in a folder that exists" in system.fs("backup", tmp_path / "no" / "b", code=1).stderr
    backup = system.fs("backup", file, "--json")
    told = json.loads(backup.stdout)
    assert told["records"] > 4
    assert "is not in the file" in backup.stderr
    refused = system.fs("restore", file, code=1)
    assert "a system runs in" in refused.stderr
    system.down()
    whole = file.read_bytes()
    (tmp_path / "damaged").write_bytes(whole[:60] + b"x" + whole[61:])
    assert "damaged" in system.fs("restore", tmp_path / "damaged", code=1).stderr
    shutil.rmtree(system.layout.redis_data)
    restored = json.loads(system.fs("restore", file, "--json").stdout)
    assert (restored["restored"], restored["left_out"]) == (True, [])
    system.up(is_open=False)
    assert json.loads(system.fs("invoke", "hello", '{"name": "Ada"}').stdout) == {"message": "Hello, Ada!"}
    assert "TOKEN" in system.fs("secret", "ls").stdout
