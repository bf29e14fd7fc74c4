"""The reference in the documentation is what the code has: verbs, settings, variables, errors, routes, exit codes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from importlib import import_module
from pathlib import Path

import click
import pytest

import fleetstart.runtime
from fleetstart.controller.cli.output import EXIT_CODES
from fleetstart.controller.cli.root import VERBS
from fleetstart.runtime.contract import errors
from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.function.spec import SLO, Limits, Scale
from fleetstart.runtime.sdk.declarations import GENERAL, OF_LAYERED, OF_LLM, OF_TRANSFORMERS
from tests.docs.generate import PAGES, generated
from tests.docs.pages import ROOT, rows, sections

CLI = (ROOT / "docs" / "cli.md").read_text()
SETTINGS = sections("docs/settings.md")
TABLES = ("Running", "Scaling and promises", "Limits on calls", "Models", "Clock, history, bill")
ROWS = {row[0].strip("`"): row for table in TABLES for row in rows(SETTINGS[table])[1:]}
OF_THE_CLI = "unreachable"
"""Made by `fs` where no server answers: no response has this code."""
OF_A_DEPLOY = {"--alias", "--canary", "--probe", "--dry-run", "--url", "--json", "--help"}
"""Flags of `fs deploy` that are no settings."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_are_current(page: Path) -> None:
    assert page.read_text() == generated(page.read_text()), "run `python -m tests.docs.generate`"


def test_the_reference_does_not_depend_on_earlier_uses_of_the_commands() -> None:
    """click keeps in each command the help option of the first context, here one without the short `-h`."""
    command: click.Command = import_module("fleetstart.controller.cli.commands.deploy").command
    for names in (["--help"], ["-h", "--help"]):
        used = copy(command)
        used._help_option = None
        used.get_help(click.Context(used, help_option_names=names))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fleetstart.controller.cli.commands.deploy.command", used)
            assert generated(CLI) == CLI


def test_every_verb_is_in_the_table() -> None:
    found = re.findall(r"^\| `fs (\w+)", CLI, re.MULTILINE)
    assert sorted(found) == sorted(VERBS)


def test_exit_codes_are_those_of_the_code() -> None:
    (sentence,) = re.findall(r"Exit codes: (.*?)\.", CLI.replace("\n", " "))
    assert [int(code) for code in re.findall(r"\d+", sentence)] == list(EXIT_CODES)


def test_every_setting_is_in_the_tables() -> None:
    parts = {f"{table}.{name}" for table, kind in (("scale", Scale), ("slo", SLO), ("limits", Limits))
             for name in kind.__struct_fields__}  # fmt: skip
    assert set(ROWS) == {*GENERAL, *OF_LAYERED, *OF_LLM, *OF_TRANSFORMERS, *parts} - {"scale", "slo", "limits"}


def test_flags_of_settings_are_those_of_a_deploy() -> None:
    command: click.Command = import_module("fleetstart.controller.cli.commands.deploy").command
    flags = {flag for option in command.params if isinstance(option, click.Option) for flag in option.opts}
    listed = {flag for row in ROWS.values() for flag in re.findall(r"`(--[\w-]+)`", row[1])}
    assert listed == {flag for flag in flags if flag.startswith("--")} - OF_A_DEPLOY


@pytest.mark.parametrize("kind", [Scale, Limits], ids=["scale", "limits"])
def test_defaults_of_tables_are_those_of_the_code(kind: type[Scale] | type[Limits]) -> None:
    for name, value in zip(kind.__struct_fields__, kind.__struct_defaults__, strict=True):
        assert float(ROWS[f"{kind.__name__.lower()}.{name}"][2]) == value


def test_every_variable_is_in_the_tables() -> None:
    text = SETTINGS["Of the command line"] + SETTINGS["Of controller, node daemon and both"]
    text += SETTINGS["Set by the supervisor alone"]
    listed = [row[0].strip("`") for row in rows(text) if row[0].startswith("`FS_")]
    assert len(listed) == len(set(listed))
    assert set(listed) == {name for room in ("controller", "prefetcher", "runtime") for name in _variables(room)}


def _variables(room: str) -> Iterator[str]:
    for path in (ROOT / room).rglob("*.py"):
        yield from re.findall(r"""["'](FS_[A-Z_]+)["']""", path.read_text())


def test_every_error_is_in_the_table() -> None:
    text, _, of_parts = sections("docs/http.md")["Errors"].partition("Some parts have codes of their own")
    listed = {(row[1].strip("`"), int(row[0])) for row in rows(text)[1:]}
    assert listed == {(error.code, error.status) for error in _errors(FleetError)}
    own = {row[1].strip("`") for row in rows(of_parts)[1:]}
    assert own == {*_codes("controller"), *_codes("runtime")} - {code for code, _ in listed} - {OF_THE_CLI}


def _codes(room: str) -> Iterator[str]:
    for path in (ROOT / room).rglob("*.py"):
        yield from re.findall(r'^    code = "(\w+)"', path.read_text(), re.MULTILINE)


def _errors(root: type[FleetError]) -> Iterator[type[FleetError]]:
    """Those of the contract: parts of the API have some of their own."""
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _errors(child)


def test_every_public_name_of_the_handler_api_has_a_place() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    shown = set(re.findall(r"^::: [\w.]+\.(\w+)$", text, re.MULTILINE))
    assert {name for name in fleetstart.runtime.__all__ if name != "context"} <= shown
    assert "Context" in shown


def test_messages_that_are_quoted_are_those_of_the_code() -> None:
    symptoms = " ".join(row[0] for row in rows((ROOT / "docs" / "troubleshooting.md").read_text()))
    quoted = re.findall(r'"([^"]+)"', symptoms)
    assert len(quoted) > 5
    source = "".join(path.read_text() for room in ("controller", "runtime") for path in (ROOT / room).rglob("*.py"))
    assert [message for message in quoted if message not in source] == []
