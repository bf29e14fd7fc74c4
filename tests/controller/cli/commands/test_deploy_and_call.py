"""Deploy, call, look and remove with the commands that people type, against one real system."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controller.cli.checkpoints import model, write_model
from tests.controller.cli.system import System

pytestmark = pytest.mark.e2e

HANDLER = """
from typing import Any
from fleetstart.runtime import function, Scale

@function(scale=Scale(max=1))
def echo(value: int = 1) -> dict[str, int]:
    print("echoing", value)
    return {"value": value}

@function(name="counter")
def count(n: int):
    for i in range(n):
        yield {"i": i}

@function
def fails():
    raise ValueError("on purpose")
"""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("system")
    (folder / "src").mkdir()  # beside the home, whose bundles are no part of this one
    (folder / "src" / "handler.py").write_text(HANDLER)
    system = System(folder / "home")
    system.up()
    try:
        system.fs("deploy", folder / "src" / "handler.py")
        yield system
    finally:
        system.down()
    system.assert_gone()


def test_deploying_prints_one_url_a_function(system: System) -> None:
    result = system.fs("deploy", system.home.parent / "src" / "handler.py")
    assert result.stdout.split() == [f"{system.url}/fn/{name}" for name in ("echo", "counter", "fails")]
    assert "echo@1 is live already" in result.stderr


def test_a_call_prints_its_answer_alone(system: System) -> None:
    result = system.fs("invoke", "echo", '{"value": 7}')
    assert json.loads(result.stdout) == {"value": 7}
    assert "start, version 1" in result.stderr
    assert "billed" in result.stderr


def test_a_body_comes_from_a_file_or_from_stdin(system: System, tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text('{"value": 8}')
    assert json.loads(system.fs("invoke", "echo", f"@{body}").stdout) == {"value": 8}
    assert json.loads(system.fs("invoke", "echo", "-", stdin='{"value": 9}').stdout) == {"value": 9}


def test_a_call_as_json_has_status_and_headers(system: System) -> None:
    answer = json.loads(system.fs("invoke", "echo", "{}", "--json").stdout)
    assert (answer["status"], answer["body"]) == (200, {"value": 1})
    assert answer["headers"]["fs-version"] == "1"


def test_a_stream_is_shown_event_by_event(system: System) -> None:
    for options in ((), ("--stream",)):
        lines = system.fs("invoke", "counter", '{"n": 3}', *options).stdout.split()
        assert "".join(lines) == '{"i":0}{"i":1}{"i":2}'


def test_a_handler_that_raises_fails_the_command(system: System) -> None:
    result = system.fs("invoke", "fails", "{}", code=1)
    assert "on purpose" in result.stderr
    assert result.stdout == ""


def test_an_unknown_function_is_suggested(system: System) -> None:
    for command in (
        ("invoke", "eco", "{}"), ("logs", "eco"), ("rm", "eco", "--yes"), ("trace", "eco"), ("usage", "eco"),
        ("invoice", "--function", "eco"), ("invocations", "ls", "--function", "eco"),
    ):  # fmt: skip
        assert "did you mean" in system.fs(*command, code=3).stderr, command


def test_an_unknown_version_is_not_an_unknown_function(system: System) -> None:
    for command in (("split", "echo", "1=50", "9=50"), ("rollback", "echo", "9")):
        told = system.fs(*command, code=3).stderr
        assert "function echo has no version 9" in told
        assert "`fs versions echo` lists them" in told
        assert "did you mean" not in told


def test_bad_input_is_the_callers(system: System) -> None:
    assert "value" in system.fs("invoke", "echo", '{"value": "x"}', code=1).stderr


def test_logs_trace_and_usage_tell_of_the_call(system: System) -> None:
    system.fs("invoke", "echo", '{"value": 4711}')
    assert "echoing 4711" in system.fs("logs", "echo").stdout
    trace = system.fs("trace", "echo").stdout
    assert "execute" in trace
    assert "█" in trace
    rows = json.loads(system.fs("trace", "echo", "--json").stdout)
    assert rows["row"]["function"] == "echo"
    assert "total" in system.fs("usage", "echo").stdout
    usage = json.loads(system.fs("usage", "--json").stdout)
    assert sum(line["cost_nusd"] for line in usage["lines"]) == usage["total_nusd"]


def test_weights_are_sent_once(system: System, tmp_path: Path) -> None:
    write_model(tmp_path / "w", model())
    source = 'from fleetstart.runtime import function\n@function(weights="./w")\ndef weighty(): ...\n'
    (tmp_path / "handler.py").write_text(source)
    assert "sent" in system.fs("deploy", tmp_path / "handler.py").stderr
    assert "in the store already" in system.fs("deploy", tmp_path / "handler.py", "--memory", "1GiB").stderr
    (info,) = [info for info in json.loads(system.fs("ls", "--json").stdout) if info["name"] == "weighty"]
    assert info["version"] == 2
    system.fs("rm", "weighty", "--yes")
    assert "weighty" not in system.fs("ls").stdout


def test_removing_asks_where_nobody_can_answer(system: System) -> None:
    assert "--yes" in system.fs("rm", "echo", code=2).stderr
