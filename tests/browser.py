"""Chromium of a test's own, driven over the devtools protocol as far as tests need it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

from tests.servers import end, spawn, wait_until

ANSWER_S = 30.0
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--no-proxy-server",
    "--disable-background-networking", "--window-size=1280,800", "--remote-debugging-port=0", "about:blank",
)  # fmt: skip


class Page:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self.complaints: list[str] = []
        """What its console had of errors and warnings."""

    def command(self, method: str, **terms: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": terms}))
        while True:
            said = json.loads(self._socket.recv(timeout=ANSWER_S))
            if said.get("id") == self._number:
                assert "error" not in said, f"{method}: {said.get('error')}"
                return dict(said["result"])
            if said.get("method") == "Log.entryAdded":
                self.complaints.append(said["params"]["entry"]["text"])
            elif said.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(said["params"]["exceptionDetails"]))

    def open(self, url: str) -> None:
        """Done when it is drawn as far as its own files go; what it asks for then may come later."""
        self.command("Page.navigate", url=url)
        wait_until(lambda: self.run("location.href") == url and self.run("document.readyState") == "complete", what=url)

    def run(self, script: str) -> Any:
        """The value of an expression; that of a promise, when it is kept."""
        done = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    @property
    def text(self) -> str:
        return str(self.run("document.body.innerText"))

    def shows(self, text: str) -> None:
        wait_until(lambda: text in self.text, 20, what=f"{text!r} on the page, which has {self.text}")

    def type(self, text: str) -> None:
        """Types the text into the focused element, and enter."""
        self.command("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13,
                         **({"text": "\r"} if kind == "keyDown" else {}))  # fmt: skip

    def screenshot(self, path: Path) -> None:
        path.write_bytes(b64decode(self.command("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def installed() -> Iterator[tuple[str, dict[str, str]]]:
    """The program and its environment: its temporary files go when it has ended. Skips where there is no chromium."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium")
    with tempfile.TemporaryDirectory(prefix="fs-web-", ignore_cleanup_errors=True) as folder:
        yield program, {**os.environ, "TMPDIR": folder}


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """Skips where there is no chromium."""
    with installed() as (program, env):
        yield from _browsing(program, env, folder)


def _browsing(program: str, env: dict[str, str], folder: Path) -> Iterator[Page]:
    port = folder / "DevToolsActivePort"
    argv = [program, f"--user-data-dir={folder}", *OPTIONS]
    process = spawn(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    try:
        wait_until(lambda: port.exists() and len(port.read_text().splitlines()) == 2, 30, what="chromium")
        at = f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json/list"
        tabs = httpx.get(at, trust_env=False, timeout=ANSWER_S).json()
        url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        with connect(url, proxy=None, max_size=None) as socket:
            page = Page(socket)
            for domain in ("Page", "Runtime", "Log"):
                page.command(f"{domain}.enable")
            yield page
    finally:
        end(process)
