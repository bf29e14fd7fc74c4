"""The stranger's machine: a folder outside the checkout, an environment with the wheel, and what is left in the end."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.servers import wait_until

NOT_THEIRS = ("FS_", "PYTHON", "VIRTUAL_ENV", "CONDA", "MAKE", "MFLAGS")
"""Beginnings of variables that a developer's shell has and a stranger's has not."""
SHOWN_LINES = 25

SIMULATED = "simulation-"
"""Prefix of what `make simulate` has in /dev/shm, which CI runs beside."""


class Failed(Exception):
    """A step that did not do what it should; its text says what to look at."""


class Machine:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.work = root / "work"
        self.tmp = root / "tmp"
        self.venv = root / "venv"
        self.work.mkdir()
        self.tmp.mkdir()
        self._shm_before = set(os.listdir("/dev/shm"))

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    def home(self, name: str) -> Path:
        """FS_HOME of one of the machines that this one plays."""
        return self.root / name

    def env(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith(NOT_THEIRS)}
        own = {
            "PATH": f"{self.venv / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "TMPDIR": str(self.tmp),
            "FS_HOME": str(self.home("vm1")),
            "FS_POOL_MEMORY": "64MiB",  # two nodes share this machine
        }
        return {**plain, **own, **(more or {})}

    def run(
        self,
        *argv: str | Path,
        limit_s: float = 60,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        code: int = 0,
    ) -> str:
        """Runs a command in the stranger's folder; returns what it printed. Errors: Failed."""
        shown = " ".join(str(part) for part in argv)[:200]
        try:
            done = subprocess.run(
                [str(part) for part in argv],
                cwd=self.work,
                env=self.env(env),
                input=stdin,
                capture_output=True,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{shown}: no end within {limit_s:.0f} s\n{_tail(error.output)}") from error
        if done.returncode != code:
            raise Failed(f"{shown}: exit code {done.returncode}\n{_tail(done.stdout)}\n{_tail(done.stderr)}")
        return done.stdout.strip()

    def script(self, *argv: str | Path, limit_s: float = 120, stdin: str = "", **env: str) -> str:
        """Runs a program of the stranger's own with the Python of the environment. What its libraries leave in the
        temporary folder is not the platform's."""
        own = self.root / "tmp-of-scripts"
        own.mkdir(exist_ok=True)
        return self.run(self.python, *argv, limit_s=limit_s, stdin=stdin, env={"TMPDIR": str(own), **env})

    def fs(self, *arguments: str | Path, home: str = "vm1", limit_s: float = 60, **env: str) -> str:
        return self.run(
            self.venv / "bin" / "fs", *arguments, limit_s=limit_s, env={"FS_HOME": str(self.home(home)), **env}
        )

    def key(self) -> str:
        return (self.home("vm1") / "key").read_text().strip()

    def processes(self) -> list[str]:
        """Living processes that have this machine's folder in their environment or command line."""
        mark = str(self.root).encode()
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or int(folder.name) == os.getpid():
                continue
            try:
                words = (folder / "cmdline").read_bytes()
                if mark in words or mark in (folder / "environ").read_bytes():
                    found.append(f"{folder.name}: {words.replace(bytes(1), b' ').decode(errors='replace')[:120]}")
            except OSError:
                continue
        return found

    def assert_clean(self) -> None:
        """Errors: Failed, with the processes and files that are left."""
        try:
            wait_until(lambda: not self.processes(), 10, what="processes")
        except AssertionError as error:
            raise Failed("processes are left:\n" + "\n".join(self.processes())) from error
        names = sorted(set(os.listdir("/dev/shm")) - self._shm_before)
        left = [f"/dev/shm/{name}" for name in names if not name.startswith(SIMULATED)]
        left += [str(path) for path in self.tmp.iterdir()]
        left += [str(path) for home in self.root.glob("vm*") for path in home.glob("run/**/*")]
        if left:
            raise Failed("files are left:\n" + "\n".join(left))

    def logs(self) -> str:
        """The last lines of each log of each machine."""
        paths = sorted(self.root.glob("vm*/logs/*.log"))
        return "\n".join(f"── {path}\n{_tail(path.read_text(errors='replace'))}" for path in paths)


class Diary:
    """Prints each step with its time."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @contextmanager
    def step(self, name: str, look_at: str) -> Iterator[list[str]]:
        """A step fills the list with what it saw. Errors: Failed, with what to look at."""
        began = time.monotonic()
        seen: list[str] = []
        try:
            yield seen
        except Exception as error:
            raise Failed(f"{name}: {error}\nlook at: {look_at}") from error
        print(f"{time.monotonic() - began:6.1f} s  {name}: {'; '.join(seen)}", flush=True)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began


def _tail(text: str | bytes | None) -> str:
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return "\n".join((text or "").splitlines()[-SHOWN_LINES:])
