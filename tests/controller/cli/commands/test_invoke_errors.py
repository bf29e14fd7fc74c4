"""Errors in OpenAI's form, as `fs invoke` shows them: with words on stderr, as it shows all others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetstart.controller.cli.api_client import Address, ApiClient
from fleetstart.controller.cli.invocation.async_invoke import print_result
from fleetstart.controller.cli.output import FAILED, OK
from fleetstart.controller.cli.root import run
from fleetstart.runtime.contract.errors import InvalidInput, NotFound
from fleetstart.runtime.contract.sse import BILL_EVENT
from fleetstart.runtime.openai_api.responses import error_body, event, respond_error
from fleetstart.runtime.worker_io.asgi import respond
from tests.servers import serving

REFUSAL = InvalidInput("the body is not JSON: Input data was truncated", hint="send a JSON object")
MISSING = NotFound("no document d7", hint="list them first")


async def refuse(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await respond_error(send, REFUSAL)


async def break_off(scope: dict[str, Any], receive: Any, send: Any) -> None:
    text = event({"choices": [{"delta": {"content": "Once"}}]})
    bill = f'event: {BILL_EVENT}\ndata: {{"billed_ms": 140, "cost": "0.1"}}\n\n'.encode()
    await respond(send, 200, text + event(error_body(MISSING)) + b"data: [DONE]\n\n" + bill, b"text/event-stream")


async def answer_as_it_likes(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await respond(send, 418, b'{"error": {"message": "I am a teapot"}}', b"application/json")


def called(app: Callable[..., Any], home: Path, *options: str) -> int:
    with serving(app) as server:
        return run(["--home", str(home), "invoke", "chat", "--url", server.url, *options])


def test_a_refusal_has_its_words_and_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(refuse, tmp_path) == FAILED
    out, err = capsys.readouterr()
    assert out == ""
    first, second, summary = err.splitlines()
    assert (first, second) == (f"error: {REFUSAL.message}", f"hint:  {REFUSAL.hint}")
    assert summary.startswith("HTTP 400, "), "what it cost is told, too"


def test_a_stored_one_is_shown_as_it_came_if_that_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(refuse) as server:
        assert run(["--home", str(tmp_path), "invocations", "get", "inv-1", "--result", "--url", server.url]) == FAILED
        assert msgspec.json.decode(capsys.readouterr().out) == error_body(REFUSAL)
        with ApiClient(Address(server.url)) as client:
            assert print_result(client, "inv-1", unchanged=False) == FAILED
    assert capsys.readouterr() == ("", f"error: {REFUSAL.message}\nhint:  {REFUSAL.hint}\n")


def test_a_stream_that_breaks_off_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(break_off, tmp_path, "--stream") == FAILED
    out, err = capsys.readouterr()
    assert out == "Once\n"
    first, second, summary = err.splitlines()
    assert (first, second) == (f"error: {MISSING.message}", f"hint:  {MISSING.hint}"), "the function's own words"
    assert summary.endswith("billed 140 ms, $0.1")


def test_scripts_get_the_answer_as_it_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(refuse, tmp_path, "--json") == FAILED
    assert msgspec.json.decode(capsys.readouterr().out)["body"] == error_body(REFUSAL)
    assert called(answer_as_it_likes, tmp_path) == FAILED
    assert capsys.readouterr().out == '{"error": {"message": "I am a teapot"}}'
    assert called(break_off, tmp_path) == OK
    assert MISSING.message in capsys.readouterr().out
