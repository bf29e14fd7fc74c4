"""Starts `ray_peer.py` in its own Python and asks it how many replicas run; ends it, whatever happens."""

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

from tests.bench.wire import Connection
from tests.servers import free_port

BOOT_S = 180.0
ZERO_S = 90.0
SETTLE_S = 1.0
"""After the last replica has gone: its process is still being taken apart."""
QUIT_S = 60.0


class Peer:
    def __init__(self, process: subprocess.Popen[str], port: int, about: dict[str, Any]) -> None:
        self._process = process
        self.port = port
        self.about = about

    def connect(self) -> Connection:
        return Connection("127.0.0.1", self.port)

    def replicas(self, app: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(f"replicas {app}\n")
        self._process.stdin.flush()
        return int(_line(self._process))

    def wait_asleep(self, app: str) -> None:
        ends = time.monotonic() + ZERO_S
        while self.replicas(app):
            if time.monotonic() > ends:
                raise TimeoutError(f"Ray Serve still has replicas of {app} after {ZERO_S:g} s")
            time.sleep(0.1)
        time.sleep(SETTLE_S)


@contextlib.contextmanager
def ray_serve(python: Path, *, model: Path | None = None) -> Iterator[Peer]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="rs-", ignore_cleanup_errors=True) as folder:
        argv = [str(python), str(Path(__file__).with_name("ray_peer.py")), "--port", str(port), "--temp-dir", folder]
        if model is not None:
            argv += ["--model", str(model)]
        log = Path(folder) / "peer.log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": ""},
            )
        try:
            try:
                about = json.loads(_line(process))
            except (RuntimeError, ValueError) as error:
                raise RuntimeError(f"Ray Serve did not start: {log.read_text()[-2000:]}") from error
            yield Peer(process, port, about)
        finally:
            _end(process)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("the peer has ended")
    return line


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
