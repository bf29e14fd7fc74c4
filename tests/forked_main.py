"""Processes of ours that are forked where their modules are imported already: a start then costs no imports.

A controller or a command of `fs` imports for a third of a second of processor time, and tests start hundreds. A forked
one has an environment, output files and an exit code of its own. The standard library's fork server does the forking.
What is about the command line of a process itself, or about its children, needs one that was not forked.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from fleetstart.controller.cli.root import VERBS

PRELOADED = (
    "fleetstart.controller.__main__",
    "fleetstart.controller.app",
    *(f"fleetstart.controller.cli.commands.{verb}" for verb in VERBS),
)

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(PRELOADED))


class ForkedMain:
    """A running function that returns an exit code, with the part of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        entry: str,
        *arguments: Sequence[str],
        env: Mapping[str, str],
        out: Path,
        err: Path,
        cwd: Path | None = None,
        listen: socket.socket | None = None,
    ) -> None:
        """Calls `module:function` with the arguments; FS_LISTEN_FD is the number that the socket has there."""
        sys.audit("os.fork")  # the fork server starts without Python's own event, by which quick tests are told apart
        files = (str(out), str(err), str(cwd or Path.cwd()))
        self._process = _CONTEXT.Process(target=_run, args=(entry, arguments, dict(env), files, listen), daemon=True)
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


def _run(
    entry: str,
    arguments: Sequence[Sequence[str]],
    env: dict[str, str],
    files: tuple[str, str, str],
    listen: socket.socket | None,
) -> None:
    """Runs in the forked process."""
    out, err, cwd = files
    for path, number in ((out, 1), (err, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env if listen is None else env | {"FS_LISTEN_FD": str(listen.detach())})
    module, _, function = entry.partition(":")
    sys.exit(getattr(import_module(module), function)(*arguments))
