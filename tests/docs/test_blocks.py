"""Blocks of code in the documentation, as far as they can be checked without a system: commands, Python, TOML, JSON."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from importlib import import_module
from typing import Any

import click
import pytest

from fleetstart.controller.cli.handler.settings import GENERAL
from fleetstart.controller.cli.root import VERBS
from fleetstart.runtime import function
from fleetstart.runtime.handlers.request_args import argument_decoder
from fleetstart.runtime.handlers.result_encoding import result_encoding_of
from fleetstart.runtime.sdk.declarations import ATTRIBUTE, Layered
from fleetstart.runtime.sdk.decorators import batching_of
from tests.docs.pages import NAMES, ROOT, Block, all_blocks

NOT_RUN = 12
"""Blocks that no test runs. Each says why; this number must be changed with them."""
ELSEWHERE = ("make ", ". .venv/bin/activate", "key=")
"""Commands that other tests stand for: `make` runs in CI, the other two are what each test's shell begins with."""
SHELL = all_blocks("sh")
COMMANDS = [(block, line) for block in SHELL for line in block.commands]


def test_each_block_that_is_not_run_says_why() -> None:
    assert len([block for block in SHELL if block.not_run]) == NOT_RUN
    marks = sum((ROOT / name).read_text().count("<!-- not run:") for name in NAMES)
    assert marks == NOT_RUN, "a mark stands above no shell block"


@pytest.mark.parametrize(("block", "line"), COMMANDS, ids=str)
def test_each_command_can_be_run_or_says_why_not(block: Block, line: str) -> None:
    assert block.not_run or line.startswith(("fs ", "curl ", "python ", *ELSEWHERE))


@pytest.mark.parametrize("line", sorted({line for _, line in COMMANDS if line.startswith("fs ")}))
def test_each_fs_line_can_be_parsed(line: str) -> None:
    _, verb, *arguments = shlex.split(line, comments=True)
    _command(verb).make_context(verb, arguments, resilient_parsing=False)


@pytest.mark.parametrize("page", NAMES)
def test_no_command_needs_the_system_after_fs_down(page: str) -> None:
    """A reader runs the commands of a page in order. `test_commands` cannot see it: its system stays up for a page."""
    is_down = False
    for block, line in COMMANDS:
        if block.page != page or block.not_run:
            continue
        if line.startswith(("fs up", "fs down")):
            is_down = line.startswith("fs down")
        else:
            assert not (is_down and line.startswith(("fs ", "curl "))), f"{block}: {line}"


def test_fs_in_running_text_names_a_verb() -> None:
    for name in NAMES:
        for verb in re.findall(r"`fs ([a-z]+)", (ROOT / name).read_text()):
            assert verb in VERBS, f"{name}: fs {verb}"


@pytest.mark.parametrize("line", sorted({line for _, line in COMMANDS if line.startswith("make ")}))
def test_each_make_target_exists(line: str) -> None:
    target = shlex.split(line, comments=True)[1]
    assert re.search(rf"^(\w+ )*{target}( \w+)*:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_paths_in_commands_exist() -> None:
    for block, line in COMMANDS:
        for path in re.findall(r"(?:examples|tests)/[\w./]+\w|\.ci/run", line):
            if "/weights" not in path:  # these are made by `make models`
                assert (ROOT / path).exists(), f"{block}: {path}"


@pytest.mark.slow
@pytest.mark.parametrize("block", all_blocks("python"), ids=str)
def test_what_a_python_block_declares_can_be_served(block: Block) -> None:
    code = compile(block.text, str(block), "exec", dont_inherit=True)
    if "fleetstart.runtime" not in block.text:
        return  # a script, which `test_commands` runs
    module: dict[str, Any] = {"function": function}
    exec(code, module)
    found = [value for value in module.values() if ATTRIBUTE in getattr(value, "__dict__", {})]
    assert found or "fleetstart.runtime import (" in block.text
    for handler in found:
        target = handler() if isinstance(handler, type) else handler
        if callable(target) and not isinstance(target, Layered) and not hasattr(target, "router"):
            argument_decoder(target, batched=batching_of(target) is not None)
            result_encoding_of(target, batched=batching_of(target) is not None)


@pytest.mark.parametrize("block", all_blocks("toml"), ids=str)
def test_a_toml_block_has_settings_that_exist(block: Block) -> None:
    settings = tomllib.loads(block.text)
    tables = settings.pop("function", {})
    assert {*settings, *(name for table in tables.values() for name in table)} <= {*GENERAL, "name"}


@pytest.mark.parametrize("block", all_blocks("json"), ids=str)
def test_a_json_block_is_json(block: Block) -> None:
    json.loads(block.text.replace("{...}", "{}").replace("\n", " "))


@pytest.mark.parametrize("block", all_blocks(), ids=str)
def test_a_block_is_of_a_language_that_is_checked(block: Block) -> None:
    assert block.language in ("sh", "python", "toml", "json", "text")


def _command(verb: str) -> click.Command:
    found: click.Command = import_module(f"fleetstart.controller.cli.commands.{verb}").command
    return found
