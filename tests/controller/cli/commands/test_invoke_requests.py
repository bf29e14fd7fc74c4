"""Requests of `fs invoke`, and the command lines whose request cannot be: they end with words and an exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetstart.controller.cli.output import NOT_FOUND, OK, USAGE
from fleetstart.controller.cli.root import run
from fleetstart.runtime.handlers.forms import Form, read_form
from fleetstart.runtime.worker_io.asgi import read_body
from tests.servers import AppServer, serving


class Echo:
    """Answers each request, and keeps its method, headers and body."""

    def __init__(self) -> None:
        self.method = ""
        self.headers: dict[bytes, bytes] = {}
        self.body = b""

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.method, self.headers, self.body = scope["method"], dict(scope["headers"]), await read_body(receive)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture(scope="module")
def echo() -> Echo:
    return Echo()


@pytest.fixture(scope="module")
def server(echo: Echo) -> Iterator[AppServer]:
    with serving(echo) as server:
        yield server


def invoke(server: AppServer, home: Path, *options: str) -> int:
    return run(["--home", str(home), "invoke", "f", "{}", "--url", server.url, *options])


def test_a_header_is_sent_as_it_was_typed(server: AppServer, echo: Echo, tmp_path: Path) -> None:
    assert invoke(server, tmp_path, "-H", "x: é ☃", "-H", "Y:1") == OK
    assert (echo.headers[b"x"].decode(), echo.headers[b"y"]) == ("é ☃", b"1")
    assert echo.headers[b"content-type"] == b"application/json"


@pytest.mark.parametrize("in_background", [[], ["--async"]])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["-H", "a b: c"], "a b"),
        (["-H", "a: b\nc: d"], "b\\nc: d"),
        (["-X", "BA D"], "method"),
        (["-X", "MÉTHODE"], "MÉTHODE"),
        (["-H", "x: \udcff"], "UTF-8"),
        (["--path", "/a\nb"], "non-printable"),
        (["--path", "/\udcff"], "surrogates"),
    ],
)
def test_a_request_that_http_does_not_allow_is_wrong_usage(
    server: AppServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str,
    in_background: list[str],
) -> None:  # fmt: skip
    assert invoke(server, tmp_path, *options, *in_background) == USAGE
    told = capsys.readouterr().err
    assert "cannot be sent" in told
    assert says in told


@pytest.mark.parametrize("seconds", ["nan", "-1", "0"])
def test_a_timeout_is_some_time(seconds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--home", str(tmp_path), "invoke", "f", "--timeout", seconds]) == USAGE
    assert "--timeout" in capsys.readouterr().err


def test_a_timeout_may_be_without_end(server: AppServer, tmp_path: Path) -> None:
    assert invoke(server, tmp_path, "--timeout", "inf") == OK


def call_with_form(server: AppServer, home: Path, *fields: str) -> int:
    options = [option for field in fields for option in ("-F", field)]
    return run(["--home", str(home), "invoke", "f", "--url", server.url, "--path", "/x", *options])


def form_of(echo: Echo) -> Form:
    async def receive() -> Any:
        return {"type": "http.request", "body": echo.body}

    return asyncio.run(read_form(receive, echo.headers[b"content-type"]))


def test_a_form_has_its_files_and_values_in_their_order(server: AppServer, echo: Echo, tmp_path: Path) -> None:
    picture = tmp_path / "ä.jpg"
    picture.write_bytes(b"\xff\xd8\x00")
    assert call_with_form(server, tmp_path, f"files=@{picture}", "title=a=b ☃", f"files=@{picture}", "no=") == OK
    assert echo.method == "POST"
    form = form_of(echo)
    found = [(part.name, part.filename, part.content_type, part.body.content()) for part in form.parts]
    form.close()
    sent = ("files", "ä.jpg", "image/jpeg", b"\xff\xd8\x00")
    assert found == [sent, ("title", None, "", "a=b ☃".encode()), sent, ("no", None, "", b"")]


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["-F", "files"], USAGE, "-F 'files' is neither NAME=VALUE nor NAME=@FILE"),
        (["-F", "=a"], USAGE, "neither NAME=VALUE"),
        (["-F", "\udcff=a"], USAGE, "the form cannot be sent"),
        (["-F", "files=@nowhere"], NOT_FOUND, "there is no file nowhere"),
        (["{}", "-F", "a=b"], USAGE, "not both"),
    ],
)
def test_a_form_that_cannot_be_sent(
    options: list[str], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--home", str(tmp_path), "invoke", "f", *options]) == code
    assert says in capsys.readouterr().err
