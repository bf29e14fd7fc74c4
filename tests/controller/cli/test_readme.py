"""The README tells of every command, and promises no command or option that does not exist."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import click
import pytest

from fleetstart.controller.cli.output import EXIT_CODES
from fleetstart.controller.cli.root import VERBS

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", README + (ROOT / "examples" / "README.md").read_text(), re.DOTALL)
LINES = [line.strip() for block in BLOCKS for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def command(verb: str) -> click.Command:
    found: click.Command = import_module(f"fleetstart.controller.cli.commands.{verb}").command
    return found


def test_every_command_is_in_the_table() -> None:
    rows = re.findall(r"^\| `fs (\w+)", README, re.MULTILINE)
    assert sorted(set(rows)) == sorted(VERBS)


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("fs ")])
def test_each_fs_line_can_be_parsed(line: str) -> None:
    _, verb, *arguments = shlex.split(line, comments=True)
    command(verb).make_context(verb, arguments, resilient_parsing=False)


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("make ")])
def test_each_make_target_exists(line: str) -> None:
    target = shlex.split(line, comments=True)[1]
    assert re.search(rf"^(\w+ )*{target}( \w+)*:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_files_that_are_named_exist() -> None:
    for path in re.findall(r"examples/\w+/handler\.py|examples/README\.md|\.ci/run", README):
        assert (ROOT / path).is_file(), path


def test_exit_codes_are_those_of_the_code() -> None:
    (sentence,) = re.findall(r"Exit codes: (.*?)\.", README.replace("\n", " "))
    assert [int(code) for code in re.findall(r"\d+", sentence)] == list(EXIT_CODES)
