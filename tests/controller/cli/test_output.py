"""Text of others in a terminal: colours stay, and nothing else that a terminal obeys. Tables with many names."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.cli.commands.project import table as projects_table
from fleetstart.controller.cli.output import data, json_line, on_one_line, printable, show_error, table
from fleetstart.controller.schemas.access import ProjectInfo
from fleetstart.controller.state.access_records import Quotas
from fleetstart.runtime.contract.errors import FleetError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\tü 漢字\n", "plain\tü 漢字\n"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        ("\x1b[31mred", "\x1b[31mred\x1b[0m"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2J\x1b[1;1H", "\\x1b[2J\\x1b[1;1H"),
        ("done\rfake", "done\\rfake"),
        ("a\x9b2J", "a\\x9b2J"),
        ("user\u202etxt.exe", "user\\u202etxt.exe"),
        ("\x08\x7f\x00", "\\x08\\x7f\\x00"),
    ],
)
def test_control_characters_are_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters(codec="utf-8")))
def test_whatever_is_shown_has_colours_at_most(text: str) -> None:
    left = printable(text)
    for character in left.replace("\x1b[", ""):
        assert character in "\t\n" or not ("\x00" <= character < " " or "\x7f" <= character <= "\x9f")


def test_a_table_has_no_control_characters_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    """The path of a rejected request in `fs audit`, or a function's error in `fs ls`: anybody can write these."""
    data(table(("DID", "TO WHAT"), [("read", "/api/v1/\x1b]0;title\x07"), ("read", "a\rb\nrow")]))
    assert capsys.readouterr().out == "DID   TO WHAT\nread  /api/v1/\\x1b]0;title\\x07\nread  a\\rb\\nrow\n"


def test_an_error_of_others_begins_no_line_of_ours() -> None:
    assert on_one_line("OSError: x\nhello  1  2 ready") == "OSError: x\\nhello  1  2 ready"


def test_a_name_that_is_no_text_is_json_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    json_line({"found": ["/home/h\udce9me"], "size": 1})
    show_error(FleetError("no h\udce9me"), as_json=True)
    told = capsys.readouterr()
    assert told.out == '{"found":["/home/h\\\\udce9me"],"size":1}\n'
    assert '"message":"no h\\\\udce9me"' in told.err


def test_a_project_is_a_line_with_each_of_its_quotas() -> None:
    quotas = Quotas(
        functions=3001, workers=16, memory_bytes=64 << 30, calls_per_s=2.5, store_bytes=200 << 30, objects=9
    )
    functions = [f"f{number}" for number in range(3000)]
    info = ProjectInfo(name="ml", quotas=quotas, functions=functions, workers=4, memory_bytes=1 << 30,
                       store_bytes=3 << 29, objects=7, secrets=[])  # fmt: skip
    _, row = projects_table([info]).splitlines()
    cells = ["ml", "3000 of 3001", "4 of 16", "1.0 GiB of 64.0 GiB", "2.5", "1.5 GiB of 200.0 GiB", "7 of 9", "listed"]
    assert re.split(r" {2,}", row) == [*cells, f"{', '.join(functions[:20])} and 2,980 more"]
