"""Each row of the table of settings by place is true: decorator, `fs.toml` and flag give a deploy the same value."""

from __future__ import annotations

import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest

from fleetstart.controller.cli.handler.select import flags_of
from fleetstart.controller.cli.handler.settings import merge_settings, read_settings_file
from fleetstart.controller.cli.handler.source.declarations import SETTINGS, read_declarations
from tests.docs.setting_places import EXAMPLES, TABLES, Example

MODELS = {"llm": "LLM", "transformers": "Transformers"}
DECLARATION = "from fleetstart.runtime import LLM, SLO, Layered, Limits, Scale, Transformers, function\n"
LAYERED = "class Greet(Layered):\n    def layer(self, weights, index): ...\n    def before(self, text: str): ...\n"
HANDLER = "def hello(name: str): ...\n"
OF_FLAGS = set(flags_of.__annotations__) - {"return"}
IDS = [one.name for one in EXAMPLES]


def handler(one: Example, setting: str) -> str:
    if one.kind in MODELS:
        extra = 'task="embedding"' if one.kind == "transformers" and not setting.startswith("task") else ""
        given = ", ".join(part for part in ('weights="./w"', extra, setting) if part)
        return f"{DECLARATION}greet = {MODELS[one.kind]}({given})\n"
    body = LAYERED if one.kind == "layered" else HANDLER
    return f"{DECLARATION}@function({setting})\n{body}"


def merged(folder: Path, one: Example, *, setting: str = "", toml: str = "", flags: dict[str, Any]) -> Any:
    """What a deploy makes of it: the value of the setting under test, and the place that it came from."""
    (folder / "handler.py").write_text(handler(one, setting))
    (folder / "fs.toml").write_text(toml)
    (declaration,) = read_declarations(folder / "handler.py")
    found = merge_settings(declaration, read_settings_file(folder), flags)
    parts = [tuple([*one.path, key]) for key in one.value] if isinstance(one.value, dict) else [tuple(one.path)]
    return {found[part].origin for part in parts}, [found[part].value for part in parts]


def wanted(one: Example) -> list[Any]:
    return list(one.value.values()) if isinstance(one.value, dict) else [one.value]


@pytest.mark.parametrize("one", EXAMPLES, ids=IDS)
def test_the_decorator_is_read(one: Example, tmp_path: Path) -> None:
    assert merged(tmp_path, one, setting=one.decorator, flags={}) == ({"decorator"}, wanted(one))


@pytest.mark.parametrize("one", [one for one in EXAMPLES if one.toml], ids=lambda one: one.name)
def test_fs_toml_is_read(one: Example, tmp_path: Path) -> None:
    assert merged(tmp_path, one, toml=one.toml, flags={}) == ({"fs.toml"}, wanted(one))


@pytest.mark.parametrize("one", [one for one in EXAMPLES if one.flag], ids=lambda one: one.name)
def test_the_flag_is_read(one: Example, tmp_path: Path) -> None:
    command: click.Command = import_module("fleetstart.controller.cli.commands.deploy").command
    context = command.make_context("deploy", ["handler.py", *shlex.split(one.flag)])
    taken = {name: value for name, value in context.params.items() if name in OF_FLAGS}
    assert merged(tmp_path, one, flags=flags_of(**taken)) == ({"flag"}, wanted(one))


def test_every_setting_has_a_row() -> None:
    names = {name for names in SETTINGS.values() for name in names}
    parts = {f"{table}.{part}" for table, (_, kind) in TABLES.items() for part in kind.__struct_fields__}
    assert set(IDS) == {*names, *parts} - set(TABLES)
