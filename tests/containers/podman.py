"""A real Podman for tests: its service, which speaks the Docker API, with everything that it has in one folder.

Like the Docker engine of tests (engine.py) it runs in network and mount namespaces of its own, and is ended by pid. It
makes its control groups below `libpod_parent`, which is removed where nobody else has any there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.containers.engine import CGROUPS, START_TIMEOUT_S, why_none
from tests.servers import wait_until

SETTINGS = """
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
[containers]
cgroups = "enabled"
"""
END_TIMEOUT_S = 15


class Podman:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"unix://{folder}/podman.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        settings = self.folder / "containers.conf"
        settings.write_text(SETTINGS)
        state = ["--root", f"{self.folder}/root", "--runroot", f"{self.folder}/run", "--storage-driver", "vfs"]
        service = ["podman", *state, "system", "service", "--time=0", self.address]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("unshare", "--net", "--mount", "--propagation", "private"),
                    *("sh", "-c", 'ip link set lo up; exec "$@"', "sh", *service),
                ],
                stdout=log,
                stderr=log,
                env={
                    "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
                    "HOME": str(self.folder),
                    "CONTAINERS_CONF": str(settings),
                    "TMPDIR": str(self.folder),
                },
                start_new_session=True,
            )
        wait_until(self._answers, START_TIMEOUT_S, what=f"Podman ({self.folder / 'log'})")

    def docker(self, *words: str) -> str:
        """Output of Docker's command line, which it answers as well."""
        command = ["docker", "--host", self.address, *words]
        env = {"PATH": os.environ["PATH"], "HOME": str(self.folder)}
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60).stdout

    def names(self) -> list[str]:
        """Names of all its containers, whatever their state."""
        return self.docker("ps", "--all", "--format", "{{.Names}}").split()

    def stop(self) -> None:
        """Ends it and all its containers."""
        if self._process is not None:
            with contextlib.suppress(subprocess.SubprocessError):
                if found := self.names():
                    self.docker("rm", "--force", *found)
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT_S)
            self._process.kill()
            self._process.wait()
        for group in CGROUPS.glob("*/libpod_parent"):
            for path, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(path)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
        with contextlib.suppress(subprocess.SubprocessError):
            return bool(self.docker("version", "--format", "{{.Server.Version}}").strip())
        return False


@contextlib.contextmanager
def podman() -> Iterator[Podman]:
    """A Podman that runs. Skips where there can be none, which fails in CI."""
    import pytest  # late: benchmarks have an engine, too

    if reason := why_none() or (
        "" if shutil.which("podman") else "podman is not installed (Debian: apt install podman)"
    ):
        pytest.skip(reason)
    engine = Podman(Path(tempfile.mkdtemp(prefix="fs-podman-")))
    try:
        engine.start()
        yield engine
    finally:
        engine.stop()
