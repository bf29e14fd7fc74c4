"""Completions of a shell behind a verb: names of the server's functions, and of files."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import CompletionItem, ShellComplete

from fleetstart.controller.cli.completions import TIMEOUT_S
from fleetstart.controller.cli.root import VERBS, root
from fleetstart.runtime.worker_io.asgi import respond
from tests.servers import serving
from tests.stopwatch import Stopwatch

BY_FUNCTION = [
    ["invoke"], ["logs"], ["shell"], ["trace"], ["explain"], ["history"], ["versions"], ["rollback"], ["alias"],
    ["split"], ["scale"], ["usage"], ["budget", "set"], ["budget", "rm"], ["rm"],
]  # fmt: skip
BY_FILE = [["deploy"], ["dev"], ["config", "show"], ["weights", "push"], ["backup"]]


class Functions:
    """A server with three functions, for those who have the key."""

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if (scope["path"], dict(scope["headers"])[b"authorization"]) == ("/api/v1/functions", b"Bearer k1"):
            await respond(send, 200, b'[{"name": "chat", "x": 1}, {"name": "chart"}, {"name": "embed"}]', b"")
        else:
            await respond(send, 401, b"{}", b"")


def completed(before: list[str], begun: str) -> list[CompletionItem]:
    return ShellComplete(root, {}, "fs", "_FS_COMPLETE").get_completions(before, begun)


def test_names_of_functions_are_those_of_the_server(tmp_path: Path) -> None:
    with serving(Functions()) as server:
        for words in BY_FUNCTION:
            assert words[0] in VERBS
            verb = ["--home", str(tmp_path), "--key", "k1", *words, "--url", server.url]
            assert [item.value for item in completed(verb, "ch")] == ["chat", "chart"], words
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "endpoint").write_text(server.url)
        own = ["--home", str(tmp_path), "--key", "k1", "logs"]
        assert [item.value for item in completed(own, "e")] == ["embed"]
        assert completed(["--home", str(tmp_path), "--key", "other", "logs"], "e") == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[::1", ""])
def test_without_a_server_there_are_none(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert completed(["--home", str(tmp_path), "logs", *(["--url", url] if url else [])], "") == []
    assert capsys.readouterr() == ("", "")


def test_a_server_that_is_silent_is_not_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        watch = Stopwatch()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert completed(["--home", str(tmp_path), "logs", "--url", url], "") == []
    assert watch.unhindered_s < 2 * TIMEOUT_S


@pytest.mark.parametrize("words", BY_FILE, ids=" ".join)
def test_files_are_completed_by_the_shell(words: list[str]) -> None:
    assert [(item.type, item.value) for item in completed(words, "first/han")] == [("file", "first/han")]
