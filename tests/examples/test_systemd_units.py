"""The units of systemd in `examples/deploy`: systemd takes each line of them, and `fs` the commands that they start."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest

from tests.docs.pages import ROOT

UNITS = sorted((ROOT / "examples" / "deploy").glob("*.service"))
INSTALLED = "/opt/fleetstart/bin/fs"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_has_nothing_to_say_against_it(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(INSTALLED, str(Path(sys.executable).with_name("fs"))))
    ran = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, timeout=60, check=False
    )
    said = [line for line in (ran.stdout + ran.stderr).splitlines() if unit.name in line]  # others' units may be bad
    assert (ran.returncode, said) == (0, [])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_what_it_starts_is_a_command_in_the_foreground(unit: Path) -> None:
    lines = unit.read_text().replace("\\\n", " ").splitlines()
    (started,) = (line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart="))
    program, verb, *arguments = shlex.split(started)
    assert program == INSTALLED
    assert "--foreground" in arguments
    command: click.Command = import_module(f"fleetstart.controller.cli.commands.{verb}").command
    if isinstance(command, click.Group):
        found = command.get_command(click.Context(command), arguments.pop(0))
        assert found is not None
        command = found
    command.make_context(verb, arguments)
