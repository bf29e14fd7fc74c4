"""Generated parts of the documentation. `python -m tests.docs.generate` writes them; a test holds them current.

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import copy
from importlib import import_module

import click

from fleetstart.controller.api.endpoints import markdown_table
from fleetstart.controller.cli.root import VERBS
from fleetstart.runtime.openai_api.request_fields import markdown_table as request_fields_table
from tests.docs.error_codes import markdown_table as error_codes_table
from tests.docs.error_codes import parts_table
from tests.docs.gpu_results import markdown as gpu_tables
from tests.docs.isolation_marks import markdown_table as isolation_marks_table
from tests.docs.model_support import markdown_table as model_support_table
from tests.docs.pages import ROOT
from tests.docs.setting_places import markdown_table as setting_places_table

WIDTH = 100
_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def verbs() -> str:
    """The help of each verb and of each verb's own commands."""
    root = click.Context(
        click.Group("fs"),
        info_name="fs",
        help_option_names=["-h", "--help"],
        terminal_width=WIDTH,
        max_content_width=WIDTH,
    )
    parts = []
    for verb in VERBS:
        command: click.Command = import_module(f"fleetstart.controller.cli.commands.{verb}").command
        texts = "\n\n".join(_helps(command, verb, root))
        parts.append(f"### fs {verb}\n\n```text\n{texts}\n```\n")
    return "\n" + "\n".join(parts) + "\n"


def _helps(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    command = copy(command)
    command._help_option = None  # click remembers the one of an earlier context, which may have had other names
    context = click.Context(command, info_name=name, parent=parent)
    lines = command.get_help(context).splitlines()
    yield "\n".join(line.rstrip() for line in lines)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from _helps(found, below, context)


def endpoints() -> str:
    return f"\n{markdown_table()}\n"


def request_fields() -> str:
    return f"\n{request_fields_table()}\n"


def error_codes() -> str:
    return f"\n{error_codes_table()}\n"


def error_codes_of_parts() -> str:
    return f"\n{parts_table()}\n"


def setting_places() -> str:
    return f"\n{setting_places_table()}\n"


def model_support() -> str:
    return f"\n{model_support_table()}\n"


def gpu() -> str:
    return f"\n{gpu_tables()}\n\n"


def isolation_marks() -> str:
    return f"\n{isolation_marks_table()}\n"


_ALL = (
    *(verbs, endpoints, request_fields, error_codes, error_codes_of_parts, setting_places, model_support, gpu),
    isolation_marks,
)
PARTS: dict[str, Callable[[], str]] = {part.__name__: part for part in _ALL}
PAGES = tuple(
    ROOT / "docs" / name for name in ("cli.md", "contributing.md", "http.md", "models.md", "results.md", "settings.md")
)


def generated(text: str) -> str:
    return _PART.sub(lambda match: match[1] + PARTS[match[2]]() + match[3], text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(generated(page.read_text()))
