"""What the reader finds in a handler file, what it refuses, and that it never runs a line of it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.cli.handler.source.declarations import (
    FUNCTION_SETTINGS,
    LLM_SETTINGS,
    TRANSFORMERS_SETTINGS,
    Declaration,
    read_declarations,
)
from fleetstart.controller.cli.handler.source.parse import imports_of, parse
from fleetstart.runtime.contract.errors import FleetError, HandlerSyntax, InvalidSpec, NoHandler, NotFound
from fleetstart.runtime.contract.function.spec import SLO, Limits, Scale
from fleetstart.runtime.sdk import declarations

HEAD = "from fleetstart.runtime import function, LLM, SLO, Limits, Scale, Transformers\n"


def read(tmp_path: Path, source: str | bytes) -> list[Declaration]:
    path = tmp_path / "handler.py"
    path.write_bytes(source.encode() if isinstance(source, str) else source)
    return read_declarations(path)


def test_settings_are_those_of_the_runtime() -> None:
    assert set(FUNCTION_SETTINGS) == {*declarations.GENERAL, *declarations.OF_CODE}
    assert set(LLM_SETTINGS) == {*declarations.GENERAL, *declarations.OF_LLM}
    assert set(TRANSFORMERS_SETTINGS) == {
        *declarations.GENERAL,
        *declarations.OF_CODE,
        *declarations.OF_TRANSFORMERS,
    }


@pytest.mark.parametrize(
    ("source", "attribute", "kind", "settings"),
    [
        (HEAD + "@function\ndef f(x): ...", "f", "function", {}),
        (HEAD + "@function()\ndef f(x): ...", "f", "function", {}),
        (HEAD + "@function\nasync def f(x): ...", "f", "function", {}),
        (HEAD + "@function(memory='1GiB')\nclass F: ...", "F", "function", {"memory": "1GiB"}),
        (HEAD + "app = 1\nx = function(concurrency=8)(app)", "x", "function", {"concurrency": 8}),
        (HEAD + "app = 1\nx = function(app)", "x", "function", {}),
        (HEAD + "x: object = LLM(weights='./w', max_batch=4)", "x", "llm", {"weights": "./w", "max_batch": 4}),
        (
            "from fleetstart.runtime import Transformers\nx = Transformers(weights='w', task='reranking')",
            "x",
            "transformers",
            {"weights": "w", "task": "reranking"},
        ),
        ("from fleetstart.runtime import function as fn\n@fn\ndef f(): ...", "f", "function", {}),
        (
            "import fleetstart.runtime as fs\n@fs.function(network=True)\ndef f(): ...",
            "f",
            "function",
            {"network": True},
        ),
        ("import fleetstart.runtime\n@fleetstart.runtime.function\ndef f(): ...", "f", "function", {}),
        ("from fleetstart import runtime\nx = runtime.LLM(weights='w')", "x", "llm", {"weights": "w"}),
        ("from fleetstart.runtime import *\n@function\ndef f(): ...", "f", "function", {}),
        (
            HEAD + "@function(scale=Scale(max=8, keep_alive_s=60))\ndef f(): ...",
            "f",
            "function",
            {"scale": Scale(max=8, keep_alive_s=60)},
        ),
        (
            HEAD + "x = LLM(weights='w', slo=SLO(ttft_s=2, tpot_s=0.2))",
            "x",
            "llm",
            {"weights": "w", "slo": SLO(ttft_s=2, tpot_s=0.2)},
        ),
        (
            "import fleetstart.runtime as fs\n@fs.function(slo=fs.SLO(ttft_s=1 / 2))\ndef f(): ...",
            "f",
            "function",
            {"slo": SLO(ttft_s=0.5)},
        ),
        (
            HEAD + "MB = 1024 * 1024\nSIZE = 3 * MB\n@function(memory=SIZE + MB, timeout_s=-(-5) / 2)\ndef f(): ...",
            "f",
            "function",
            {"memory": 4 * 1024 * 1024, "timeout_s": 2.5},
        ),
        (
            HEAD + "@function(limits=Limits(rate=0.5), cors=['https://a.b'], max_body='1MiB')\ndef f(): ...",
            "f",
            "function",
            {"limits": Limits(rate=0.5), "cors": ["https://a.b"], "max_body": "1MiB"},
        ),
        (HEAD + "D = 'a' + '/b'\n@function(weights=D)\ndef f(): ...", "f", "function", {"weights": "a/b"}),
        (
            HEAD + "@function(env={'A': '1'}, include=['*.txt'])\ndef f(): ...",
            "f",
            "function",
            {"env": {"A": "1"}, "include": ["*.txt"]},
        ),
        (
            "try:\n    from fleetstart.runtime import function\nexcept E:\n    raise\n@function\ndef f(): ...",
            "f",
            "function",
            {},
        ),
        (HEAD + "N = 1\nN = 2\n@function(concurrency=N)\ndef f(): ...\nN = 3", "f", "function", {"concurrency": 2}),
    ],
)
def test_a_declaration_is_read(
    tmp_path: Path, source: str, attribute: str, kind: str, settings: dict[str, object]
) -> None:
    (declaration,) = read(tmp_path, source)
    assert (declaration.attribute, declaration.kind, dict(declaration.settings)) == (attribute, kind, settings)


def test_several_functions_are_read_in_order_and_the_last_of_a_name_counts(tmp_path: Path) -> None:
    source = HEAD + "@function\ndef b(): ...\n@function(memory=1)\ndef a(): ...\n@function(memory=2)\ndef a(): ..."
    assert [(found.attribute, dict(found.settings)) for found in read(tmp_path, source)] == [
        ("b", {}),
        ("a", {"memory": 2}),
    ]


@pytest.mark.parametrize(
    "source",
    [
        "",
        "x = 1",
        "def function(f): return f\n@function\ndef f(): ...",
        "from other import function\n@function\ndef f(): ...",
        HEAD + "function = print\n@function\ndef f(): ...",
        HEAD + "@function\ndef f(): ...\nf = 3",
        HEAD + "@function\ndef f(): ...\ndel f",
    ],
)
def test_a_file_without_a_function_says_what_to_add(tmp_path: Path, source: str) -> None:
    with pytest.raises(NoHandler) as error:
        read(tmp_path, source)
    assert "handler.py declares no function" in error.value.message
    assert "@function" in error.value.hint


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "@function(memory=open('/etc/passwd').read())\ndef f(): ...",
            "function(memory=...): `open('/etc/passwd').read()`",
        ),
        ("import os\n@function(memory=os.environ['M'])\ndef f(): ...", ":3: function(memory=...)"),
        ("M = print()\n@function(memory=M)\ndef f(): ...", "`M` is computed at line 2"),
        ("@function(memory=M)\ndef f(): ...", "`M` is not a constant of this file"),
        ("M = 1\nM += 1\n@function(memory=M)\ndef f(): ...", "`M` is computed at line 3"),
        ("M = 1\nfor M in []: ...\n@function(memory=M)\ndef f(): ...", "`M` is computed at line 3"),
        ("@function(memory=9**9**9)\ndef f(): ...", "a power beyond"),
        ("@function(memory=2**200)\ndef f(): ...", "a power beyond"),
        ("@function(memory=2**128*9)\ndef f(): ...", "not a number that a setting can have"),
        ("@function(memory=1//0)\ndef f(): ...", "1 // 0"),
        ("@function(memory=0**-1)\ndef f(): ...", "power"),
        ("@function(memory=(-8)**0.5)\ndef f(): ...", "not a number"),
        ("@function(weights='a'*10**9)\ndef f(): ...", "not arithmetic on numbers"),
        ("@function(weights=f'{1}')\ndef f(): ...", "would have to be run"),
        ("@function(memory=True+1)\ndef f(): ...", "not arithmetic"),
        ("@function(env={**{}})\ndef f(): ...", "** inside a dict"),
        ("@function(env={1: 'x'})\ndef f(): ...", "key 1 is not text"),
        ("@function(**{'memory': 1})\ndef f(): ...", "function(**...) is not read"),
        ("@function(1)\ndef f(): ...", "takes settings by name only"),
        ("@function(memry=1)\ndef f(): ...", "no setting 'memry'"),
        ("@function(scale=Scale(mx=1))\ndef f(): ...", "Scale() has no setting 'mx'"),
        ("@function(scale=Scale(max='8'))\ndef f(): ...", "Scale(max=...) must be a number"),
        ("@function(scale=Scale(max=0))\ndef f(): ...", "max >= 1"),
        ("@function(scale=Scale(8))\ndef f(): ...", "by name only"),
        ("@function(slo=SLO(ttft=1))\ndef f(): ...", "SLO() has no setting 'ttft'"),
        ("@function(slo=SLO(ttft_s='2'))\ndef f(): ...", "SLO(ttft_s=...) must be a number of seconds"),
        ("@function(slo=SLO())\ndef f(): ...", "ttft_s or tpot_s must be given"),
        ("@LLM\nclass f: ...", "LLM is not a decorator"),
        ("@Transformers\nclass f: ...", "Transformers is not a decorator"),
        ("x = Transformers(weights='w', task='rerank')", ":2: Transformers(task='rerank'): there is no such task"),
        ("x = Transformers(weights='w')", "Transformers() needs a task"),
        ("x = Transformers(weights='w', task='embedding', dtype='bf16')", "Transformers() has no setting 'dtype'"),
        ("x = function(memory=1)", "given no handler"),
        ("if 1:\n    @function\n    def f(): ...", "inside another statement"),
        ("try:\n    x = LLM(weights='w')\nexcept E: ...", "inside another statement"),
    ],
)
def test_a_setting_that_cannot_be_read_is_refused_with_its_line(tmp_path: Path, source: str, says: str) -> None:
    with pytest.raises(InvalidSpec) as error:
        read(tmp_path, HEAD + source)
    assert says in error.value.message
    assert "handler.py:" in error.value.message


@pytest.mark.parametrize("made", ["fastapi.FastAPI(title='x')", "Starlette(routes=[])", "get_asgi_application()"])
def test_an_app_is_told_how_it_becomes_a_function(tmp_path: Path, made: str) -> None:
    with pytest.raises(NoHandler) as error:
        read(tmp_path, f"import fastapi\nservice = {made}\n")
    assert "write `web = function(service)`" in error.value.hint


def test_who_asks_for_a_device_by_another_name_is_told_ours(tmp_path: Path) -> None:
    for source in ("@function(num_gpus=1)\ndef f(): ...", "x = LLM(weights='w', device='cuda')"):
        with pytest.raises(InvalidSpec, match="devices are asked for as gpu"):
            read(tmp_path, HEAD + source)


def test_a_misspelt_setting_is_suggested(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec) as error:
        read(tmp_path, HEAD + "@function(concurency=1)\ndef f(): ...")
    assert error.value.hint == "did you mean 'concurrency'?"


def test_a_syntax_error_shows_line_column_and_caret(tmp_path: Path) -> None:
    with pytest.raises(HandlerSyntax) as error:
        read(tmp_path, HEAD + "def f(:\n    pass")
    where, line, caret = error.value.message.splitlines()
    assert "handler.py:2:7: " in where
    assert line == "    def f(:"
    assert caret.index("^") == 4 + 6


@pytest.mark.parametrize(
    "source",
    [
        b"\x00\x00\x00",
        b"# -*- coding: no-such -*-\n",
        b"# -*- coding: utf-8 -*-\nx = '\xff'",
        b"\xff\xfe",
        b"(" * 5000,
        b"x = " + b"-" * 20_000 + b"1",
        b"x = " + b"1+" * 50_000 + b"1",
        b"x" * (5 * 1024 * 1024),
    ],
    ids=["null", "coding", "utf-8", "bom", "parentheses", "unary", "sum", "large"],
)
def test_hostile_bytes_give_a_syntax_error(tmp_path: Path, source: bytes) -> None:
    with pytest.raises((HandlerSyntax, NoHandler)):
        read(tmp_path, source)


def test_nothing_of_the_file_is_run(tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    source = f"open({str(trap)!r}, 'w')\n{HEAD}@function\ndef f(x=open({str(trap)!r}, 'w')): ...\nraise SystemExit"
    assert [found.attribute for found in read(tmp_path, source)] == ["f"]
    assert not trap.exists()


@pytest.mark.parametrize(("name", "says"), [("missing.py", "does not exist"), (".", "is a folder")])
def test_a_file_that_is_not_there(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(NotFound, match=says):
        read_declarations(tmp_path / name)


@given(st.text(alphabet="fLM()=@\n ,:'*+-[]{}x1#.", max_size=80))
def test_any_source_gives_declarations_or_an_error_of_the_contract(
    tmp_path_factory: pytest.TempPathFactory, tail: str
) -> None:
    path = tmp_path_factory.mktemp("any") / "handler.py"
    path.write_text(HEAD + "f = function\nL = LLM\n" + tail)
    with suppress(FleetError):
        read_declarations(path)


def test_imports_are_found_wherever_they_stand() -> None:
    source = b"import a.b, c\nfrom d.e import f\nfrom . import g\ndef h():\n    import torch.nn"
    assert imports_of(parse(source, "x.py")) == {"a", "c", "d", "torch"}
