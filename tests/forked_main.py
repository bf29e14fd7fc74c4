"""Processes of ours that are forked where their modules are imported already: a start then costs no imports.

`ForkedMain` runs a module's `main()` as `python -m` would: with an environment, an output file and an exit code of its
own. The standard library's fork server does the forking. What is about the command line itself needs a real one.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

PRELOADED = ("fleetstart.controller.__main__", "fleetstart.controller.app")

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(PRELOADED))


class ForkedMain:
    """A running `main()`, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, module: str, *, env: Mapping[str, str], log: Path, listen: socket.socket) -> None:
        sys.audit("os.fork")  # the fork server starts without Python's own event, by which quick tests are told apart
        self._process = _CONTEXT.Process(target=_run, args=(module, dict(env), str(log), listen), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _run(module: str, env: dict[str, str], log: str, listen: socket.socket) -> None:
    """Runs in the forked process. FS_LISTEN_FD is the number that the socket has there."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(env | {"FS_LISTEN_FD": str(listen.detach())})
    sys.exit(import_module(module).main())
