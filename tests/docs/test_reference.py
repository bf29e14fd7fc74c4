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
from fleetstart.runtime.contract import worker_headers
from fleetstart.runtime.contract.function.spec import SLO, Limits, Scale
from fleetstart.runtime.sdk.declarations import GENERAL, OF_CODE, OF_LAYERED, OF_LLM, OF_TRANSFORMERS
from tests.docs.error_codes import HELP, HELP_OF_PARTS, of_the_contract
from tests.docs.generate import PAGES, generated
from tests.docs.pages import ROOT, rows, sections

CLI = (ROOT / "docs" / "cli.md").read_text()
SETTINGS = sections("docs/settings.md")
TABLES = ("Running", "Scaling and promises", "Limits on calls", "Models", "Clock, history, bill")
ROWS = {row[0].strip("`"): row for table in TABLES for row in rows(SETTINGS[table])[1:]}
OF_CALLERS = {"unreachable", "handler_response"}
"""Made by whoever calls, where no server answers or the handler itself says no: no response has these codes."""
OBJECTS = {"acall", "call", "context"}
"""Names of the handler API that are shown by their classes."""
OF_A_DEPLOY = {"--alias", "--canary", "--probe", "--dry-run", "--upgrade", "--url", "--json", "--help"}
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
    assert set(ROWS) == {*GENERAL, *OF_CODE, *OF_LAYERED, *OF_LLM, *OF_TRANSFORMERS, *parts} - {
        "scale",
        "slo",
        "limits",
    }


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
    names = ("Of the command line", "Of controller, node daemon and both", "Set by the supervisor alone")
    listed = [row[0].strip("`") for name in names for row in rows(SETTINGS[name]) if row[0].startswith("`FS_")]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(_found(r"""["'](FS_[A-Z_]+)["']""")), "read by the code, or documented, but not both"
    assert set(listed) == set(_found(r"\b(FS_[A-Z_]+[A-Z])\b")), "named in a message or a comment, and read nowhere"


def test_native_code_reads_no_variable() -> None:
    texts = [path.read_text() for path in (ROOT / "native").rglob("*.[ch]pp")]
    assert texts
    assert not any("getenv" in text for text in texts)


def _found(pattern: str) -> Iterator[str]:
    for room in ("controller", "prefetcher", "runtime"):
        for path in (ROOT / room).rglob("*.py"):
            yield from re.findall(pattern, path.read_text())


def test_every_header_is_in_the_tables() -> None:
    page = sections("docs/http.md")
    listed = {name.lower() for table in ("Request headers", "Response headers") for row in rows(page[table])
              for name in re.findall(r"`([A-Za-z-]+)[^`]*`", row[0])}  # fmt: skip
    inner = {value for name, value in vars(worker_headers).items() if name.endswith("_HEADER")}
    read = {name.lower() for name in _found(r"""["']((?:[Ff]s|[Ii]dempotent|[Ii]dempotency)-[A-Za-z-]+[a-z])["']""")}
    assert read - NO_HEADERS - inner <= listed, "a header of the code is in no table"
    assert {name for name in listed if name.startswith("fs-")} <= read, "a header of the tables is not in the code"


NO_HEADERS = {"fs-dev", "fs-entered-calls"}
"""Names that look like headers: the tag of functions under `fs dev`, and a memory file of the node daemon."""


def test_every_error_has_its_row() -> None:
    assert set(HELP) == {error.code for error in of_the_contract()}
    own = {*_found(r'(?m)^    code = "(\w+)"')} - set(HELP) - OF_CALLERS
    assert set(HELP_OF_PARTS) == own


def test_every_public_name_of_the_handler_api_has_a_place() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    shown = set(re.findall(r"^::: [\w.]+\.(\w+)$", text, re.MULTILINE))
    assert {*fleetstart.runtime.__all__} - OBJECTS <= shown
    assert "Context" in shown


def test_messages_that_are_quoted_are_those_of_the_code() -> None:
    symptoms = " ".join(row[0] for row in rows((ROOT / "docs" / "troubleshooting.md").read_text()))
    quoted = re.findall(r'"([^"]+)"', symptoms)
    assert len(quoted) > 5
    source = "".join(path.read_text() for room in ("controller", "runtime") for path in (ROOT / room).rglob("*.py"))
    assert [message for message in quoted if message not in source] == []
