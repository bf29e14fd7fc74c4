"""Starts that fail: each says what is wrong and where, in the user's own file, and the worker ends. And one with a
warning."""

from __future__ import annotations

from typing import Any

import pytest

from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.node import exit_codes
from tests.runtime.workers import Functions, Worker


def failed(worker: Worker) -> ErrorInfo:
    error = worker.start_error()
    assert worker.exit_status() == exit_codes.START_FAILED
    return error


@pytest.mark.parametrize(
    ("source", "entry", "code", "said"),
    [
        ("def g(): pass\n", "f", "no_handler", "handler has no 'f'"),
        ("f = 3\n", "f", "no_handler", "int, which cannot be called"),
        ("class f: pass\n", "f", "no_handler", "class f has no __call__"),
        ("import os\n\ndef f(:\n", "f", "syntax_error", "(handler.py:3)"),
        (
            "import os\n1 / 0\ndef f(): pass\n",
            "f",
            "start_failed",
            "ZeroDivisionError: division by zero (handler.py:2)",
        ),
        ("import missing_library\n", "f", "start_failed", "missing_library' (handler.py:1)"),
        ("raise SystemExit(3)\n", "f", "start_failed", "SystemExit (handler.py:1)"),
        (
            "class f:\n    def load(self, w):\n        w['a']\n    def __call__(self): pass\n",
            "f",
            "start_failed",
            "KeyError: 'a' (handler.py:3, in load)",
        ),
        ("class f:\n    def __init__(self): int('x')\n", "f", "start_failed", "(handler.py:2, in __init__)"),
        ("def f(*values): pass\n", "f", "start_failed", "takes *values"),
        ("def f(environ, start_response): pass\n", "f", "no_handler", "f is a WSGI app, and functions serve ASGI"),
        ("def f(a: 'Nowhere'): pass\n", "f", "start_failed", "Nowhere"),
        (
            "from fleetstart.runtime import LLM\nf = LLM(weights='./w')\n",
            "f",
            "invalid_spec",
            "deploy again",
        ),
        (
            "from fleetstart.runtime import function\n@function(memroy=1)\ndef f(): pass\n",
            "f",
            "start_failed",
            "'memory'",
        ),
        (
            "async def f(scope, receive, send):\n"
            "    await receive()\n    await send({'type': 'lifespan.startup.failed', 'message': 'no'})\n",
            "f",
            "start_failed",
            "lifespan",
        ),
    ],
)
def test_a_start_that_fails_says_what_and_where(
    functions: Functions, source: str, entry: str, code: str, said: str
) -> None:
    worker = functions.assigned(source, entry)
    error = failed(worker)
    assert error.code == code
    assert said in error.message


def test_the_traceback_is_in_the_log(functions: Functions) -> None:
    worker = functions.assigned("def helper():\n    raise ValueError('bad')\nhelper()\n")
    assert failed(worker).message == "ValueError: bad (handler.py:2, in helper)"
    assert "Traceback" in worker.log()
    assert "/tmp/function/handler.py" in worker.log()


def test_a_near_miss_is_suggested(functions: Functions) -> None:
    assert "'embed'" in failed(functions.assigned("def embed(): pass\n", "Embed")).hint


def start_other(functions: Functions, name: str, entry: str, **settings: Any) -> Worker:
    worker = functions.server.fork().pooled()
    worker.assign(functions.bundle("def f(): return 'mine'\n", name), entry, **settings)
    return worker


def test_a_missing_module_is_no_handler(functions: Functions) -> None:
    error = failed(start_other(functions, "other.py", "handler:f"))
    assert error.code == "no_handler"
    assert "'handler'" in error.message


def test_a_module_with_a_taken_name_is_refused_and_not_taken_for_the_other(functions: Functions) -> None:
    error = failed(start_other(functions, "queue.py", "queue:f"))
    assert error.code == "no_handler"
    assert "rename queue.py" in error.hint


def test_a_module_in_a_package_is_found(functions: Functions) -> None:
    bundle = functions.bundle("from .words import WORD\ndef f(): return WORD\n")
    (bundle / "app").mkdir()
    (bundle / "handler.py").rename(bundle / "app" / "main.py")
    (bundle / "app" / "words.py").write_text("WORD = 'packed'\n")
    worker = functions.server.fork().pooled()
    worker.assign(bundle, "app.main:f")
    worker.ready()
    assert worker.post().json() == "packed"


def test_a_function_that_a_deploy_would_refuse_today_serves_as_before_and_says_so_in_its_log(
    functions: Functions,
) -> None:
    """Nodes are upgraded before controllers, and versions that were deployed long before start on them."""
    worker = functions.ready(
        "from collections.abc import Iterable\nfrom dataclasses import dataclass\nfrom typing import Annotated\n"
        "from annotated_types import Ge\n"
        "@dataclass\nclass Item:\n    price: Annotated[float, Ge(0)] = 1.0\n"
        "def f(item: Item, stop: Iterable[str] = ()): return [item.price, *stop]\n"
    )
    assert worker.post({"item": {"price": -2}}).json() == [-2.0]
    (line,) = (line for line in worker.log().splitlines() if "parameter" in line)
    assert "Item.price has a constraint" in line
    assert "Iterable[str]" in line


def test_an_llm_without_a_segment_is_refused(functions: Functions) -> None:
    from fleetstart.runtime.contract.function.spec import LLMSettings
    from fleetstart.runtime.contract.ids import CheckpointId

    worker = functions.assigned("", "chat", llm=LLMSettings(), weights=CheckpointId("0" * 64))
    assert failed(worker).code == "weights_missing"


def test_a_bundle_that_is_not_there_is_said(functions: Functions) -> None:
    worker = functions.server.fork().pooled()
    bundle = functions.bundle("")
    (bundle / "handler.py").unlink()
    bundle.rmdir()
    worker.assign(bundle, "handler:f")
    error = failed(worker)
    assert error.code == "start_failed"
    assert str(bundle) in error.message
