"""Process of a peer in its own Python, driven by lines of JSON; ended whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.harness.wire import Connection
from tests.servers import free_port

HERE = Path(__file__).parent
ZERO_S = 90.0
SETTLE_S = 1.0
"""After the last replica has gone: its process is still being taken apart."""
QUIT_S = 60.0


class Talk:
    """A line of JSON there, a line of JSON back. The first line that comes says what the peer is."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self.about: dict[str, Any] = self.hear()

    def ask(self, **question: Any) -> Any:
        self.tell(**question)
        return self.hear()

    def tell(self, **question: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer has ended: {self._log.read_text()[-2000:]}")
        return json.loads(line)


@contextlib.contextmanager
def peer(python: Path, script: Path, *arguments: str) -> Iterator[Talk]:
    """A script, run by another Python, where the peer is installed."""
    with tempfile.TemporaryDirectory(prefix="rs-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "peer.log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [str(python), str(script), "--temp-dir", folder, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": ""},
            )
        try:
            yield Talk(process, log)
        finally:
            _end(process)


class RayServe:
    def __init__(self, talk: Talk, port: int) -> None:
        self._talk = talk
        self.port = port
        self.about = talk.about

    def connect(self) -> Connection:
        return Connection("127.0.0.1", self.port)

    def wait_asleep(self, app: str) -> None:
        ends = time.monotonic() + ZERO_S
        while self._talk.ask(replicas=app):
            if time.monotonic() > ends:
                raise TimeoutError(f"Ray Serve still has replicas of {app} after {ZERO_S:g} s")
            time.sleep(0.1)
        time.sleep(SETTLE_S)


@contextlib.contextmanager
def ray_serve(python: Path, *, model: Path | None = None) -> Iterator[RayServe]:
    port = free_port()
    with peer(python, HERE / "ray_peer.py", "--port", str(port), *(("--model", str(model)) if model else ())) as talk:
        yield RayServe(talk, port)


@contextlib.contextmanager
def server(python: Path, which: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """BentoML or LitServe with `hello` at /hello: its port, and what it says of itself."""
    port = free_port()
    with peer(python, HERE / "servers_peer.py", "--which", which, "--port", str(port)) as talk:
        yield port, talk.about


def _end(process: subprocess.Popen[str]) -> None:
    """Asks first: Ray's own processes end with its driver's orderly end. What is left in its session is killed."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(QUIT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
