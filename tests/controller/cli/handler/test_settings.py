"""Settings from decorator, fs.toml and flags: the later wins, and whoever asks is told which it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.cli.handler.select import select_handlers
from fleetstart.controller.cli.handler.settings import FILE, FILE_MAX_BYTES, flatten, read_settings_file, unflatten
from fleetstart.controller.cli.handler.spec import build_spec
from fleetstart.controller.cli.output import FAILED, OK
from fleetstart.controller.cli.root import run
from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.spec import FunctionSpec, Scale
from fleetstart.runtime.contract.ids import BundleId
from fleetstart.runtime.contract.sizes import GIB

HANDLER = """
from fleetstart.runtime import Scale, function

@function(memory="64MiB", scale=Scale(max=2), env={"A": "1", "B": "1"})
def hello(name: str = "world"):
    return name

@function(name="other-name")
def other():
    return 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "handler.py").write_text(HANDLER)
    return tmp_path


def specs(folder: Path, toml: str = "", **flags: Any) -> dict[str, FunctionSpec]:
    (folder / FILE).write_text(toml)
    _, handlers = select_handlers(str(folder / "handler.py"), flags)
    built = [
        build_spec(one.declaration, module="handler", bundle=BundleId("b" * 64), weights=None, imports=(), overrides={})
        for one in handlers
    ]
    return {str(spec.name): spec for spec in built}


def test_flags_win_over_the_file_and_the_file_over_the_decorator(folder: Path) -> None:
    toml = """
        memory = "1GiB"
        [scale]
        keep_alive_s = 5
        [env]
        B = "2"
        C = "2"
        [function.hello]
        concurrency = 3
    """
    found = specs(folder, toml, scale={"max": 7}, env={"C": "3"})
    hello, other = found["hello"], found["other-name"]
    assert hello.scale == Scale(max=7, keep_alive_s=5)
    assert hello.env == {"A": "1", "B": "2", "C": "3"}
    assert (hello.memory_bytes, hello.concurrency) == (GIB, 3)
    assert (other.memory_bytes, other.concurrency, other.env) == (GIB, 1, {"B": "2", "C": "3"})


@pytest.mark.parametrize("table", ["other", "other-name"])
def test_a_table_may_have_the_handlers_name_or_the_functions(folder: Path, table: str) -> None:
    assert specs(folder, f"[function.{table}]\nconcurrency = 9")["other-name"].concurrency == 9


def test_two_functions_of_a_file_have_not_one_name(folder: Path) -> None:
    """Each was a version of the other, and the last one of the file was called for both."""
    (folder / "handler.py").write_text(HANDLER.replace("other-name", "hello"))
    with pytest.raises(InvalidSpec, match=r"handler\.py:\d+: other has the name 'hello', as hello in line \d+ has"):
        specs(folder)
    with pytest.raises(InvalidSpec, match="other has the name 'hello'"):
        specs(folder, '[function.other]\nname = "hello"')
    assert select_handlers(f"{folder / 'handler.py'}:other", {})[1][0].declaration.attribute == "other"


def test_without_a_file_there_is_the_decorator(folder: Path) -> None:
    assert select_handlers(str(folder / "handler.py"), {})[1][0].declaration.settings["memory"] == "64MiB"


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("memory = ", "cannot be read"),
        ("memory = 'a'\nmemory = 'b'", "cannot be read"),
        ("memroy = '1GiB'", "no setting 'memroy'"),
        ("name = 'x'", "no setting 'name'"),
        ("function = 3", "no table of tables"),
        ("[function]\nhello = 1", "no table of tables"),
        ("[function.hello]\nmax_batch = 4", "[function.hello] has no setting 'max_batch'"),
        ("[functions.hello]\nmemory = '1GiB'", "no setting 'functions'"),
        ("\x00", "cannot be read"),
        ("a." * 5000 + "b = 1", "no setting 'a'"),
        ("x = " + "[" * 5000, "cannot be read"),
        ("# " + "x" * FILE_MAX_BYTES, f"{FILE_MAX_BYTES} at most"),
    ],
)
def test_a_file_that_is_wrong_is_refused_and_named(folder: Path, toml: str, says: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        specs(folder, toml)
    assert says in refused.value.message
    assert str(folder / FILE) in refused.value.message


@pytest.mark.parametrize(
    "toml",
    [
        "memory = 1979-05-27T07:32:00Z",
        "memory = true",
        "memory = []",
        "memory = '1 PiB of it'",
        "concurrency = '3'",
        "concurrency = 2.5",
        "concurrency = -1",
        "timeout_s = nan",
        "timeout_s = inf",
        "scale = 3",
        "[scale]\nmost = 3",
        "[scale]\nmin = 10\nmax = 2",
        "[scale.max]\nx = 1",
        "env = 'A=1'",
        "[env]\nA = 1",
        "[slo]\nttft_s = -1",
        "probe = 'no path'",
        "network = 'yes'",
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(folder: Path, toml: str) -> None:
    with pytest.raises(InvalidSpec):
        specs(folder, toml)


def test_a_file_that_is_not_text_or_no_file_is_refused(folder: Path) -> None:
    (folder / FILE).write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidSpec, match="cannot be read"):
        read_settings_file(folder)
    (folder / FILE).unlink()
    (folder / FILE).mkdir()
    with pytest.raises(InvalidSpec, match="cannot be read"):
        read_settings_file(folder)


def test_a_table_for_nobody_is_told_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs(folder, "[function.helo]\nconcurrency = 9")
    assert "settings for 'helo'" in capsys.readouterr().err


VALUES = st.none() | st.booleans() | st.integers() | st.text()


@pytest.mark.slow
@given(
    st.dictionaries(
        st.sampled_from(["memory", "concurrency", "scale", "env"]),
        VALUES | st.dictionaries(st.text(), VALUES, min_size=1),
    )
)
def test_opening_tables_loses_nothing(values: dict[str, Any]) -> None:
    assert unflatten(flatten(values)) == values


def test_config_shows_each_setting_and_where_it_was_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / FILE).write_text("[scale]\nkeep_alive_s = 5\n")
    handler = str(folder / "handler.py")
    assert run(["config", "show", f"{handler}:hello", "--concurrency", "4", "--json"]) == OK
    shown = json.loads(capsys.readouterr().out)["hello"]
    assert shown["memory"] == {"value": "64MiB", "from": "decorator"}
    assert shown["scale.keep_alive_s"] == {"value": 5, "from": "fs.toml"}
    assert shown["concurrency"] == {"value": 4, "from": "flag"}
    assert shown["timeout_s"] == {"value": 300.0, "from": "default"}
    assert shown["scale.max"] == {"value": 2, "from": "decorator"}
    assert shown["scale.min"] == {"value": 0, "from": "default"}
    assert run(["config", "show", handler]) == OK
    out = capsys.readouterr().out
    assert "decorator in handler.py" in out
    assert "512MiB" in out
    (folder / FILE).write_text("concurrency = 0\n")
    assert run(["config", "show", handler]) == FAILED
