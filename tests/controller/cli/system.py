"""`fs` as a person runs it, in a FS_HOME of the test's own, and a look at what is left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleetstart.controller.cli.home import HomeLayout, ServiceRecord, read_services, start_ticks
from tests.servers import plain_environment, wait_until

FS = Path(sys.executable).with_name("fs")


class System:
    def __init__(self, home: Path, *, profiles: str = "python", inside: Sequence[str] = ()) -> None:
        """The profiles are those that functions are called in: importing torch takes seconds, for nothing elsewhere.
        `inside`: a command that runs another one, as `nsenter` does."""
        self.home = home
        self.inside = inside
        self.profiles = profiles
        self.layout = HomeLayout(home)
        self.url = ""

    def fs(
        self, *arguments: str | Path, code: int | None = 0, stdin: str = "", env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs `fs`, and expects this exit code; None: any."""
        plain = plain_environment()
        own = {"FS_HOME": str(self.home), "FS_POOL_MEMORY": "32MiB", "FS_PROFILES": self.profiles}
        result = subprocess.run(
            [*self.inside, FS, *arguments],
            env={**plain, **own, **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=100,
        )
        told = f"{arguments}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        assert code is None or result.returncode == code, told
        return result

    def up(self, *options: str, is_open: bool = True) -> str:
        """Open, where a test is not about access."""
        self.url = self.fs("up", "--port", "0", *(["--open"] if is_open else []), *options).stdout.strip()
        return self.url

    def down(self) -> None:
        self.fs("down")

    def services(self) -> Mapping[str, ServiceRecord]:
        return read_services(self.layout)

    def kill(self, service: str) -> ServiceRecord:
        """SIGKILL; returns when the supervisor has started it again."""
        before = self.services()[service]
        os.kill(before.pid, signal.SIGKILL)
        wait_until(lambda: self._runs_again(service, before), what=f"{service} started again")
        return self.services()[service]

    def _runs_again(self, service: str, before: ServiceRecord) -> bool:
        now = self.services()[service]
        return bool(now.pid) and now.deaths > before.deaths

    def pids(self) -> list[int]:
        """Living processes that were started with this FS_HOME: ours and all that came of them."""
        mark = f"FS_HOME={self.home}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or start_ticks(int(folder.name)) is None:
                continue
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def assert_gone(self) -> None:
        wait_until(lambda: not self.pids(), what="processes")
        assert not self.layout.run.exists()
