"""A real Docker engine for tests, with everything that it has in one temporary folder.

It runs in network and mount namespaces of its own, so that it changes neither the machine's firewall nor its mounts,
and its containers' control groups are below one that is named after it. It is ended by pid, and leaves nothing behind.

    python -m tests.containers.engine    starts one, prints its address, and ends it with Ctrl-C
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.servers import wait_until

START_TIMEOUT_S = 60.0
CGROUPS = Path("/sys/fs/cgroup")


def why_none() -> str:
    """Why no engine can run here; empty if one can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    for program in ("dockerd", "containerd", "runc", "unshare"):
        if shutil.which(program, path=path) is None:
            return f"{program} is not installed (Debian: apt install docker.io)"
    return "" if os.geteuid() == 0 else "a container engine needs root"


class DockerEngine:
    """One engine. It can be killed and started again, with its containers and images."""

    def __init__(
        self, folder: Path, *, networks: bool = False, dockerd: str = "dockerd", options: Sequence[str] = ()
    ) -> None:
        """`networks`: it has bridges and NAT for its containers, inside its own network namespace. `options`: more of
        dockerd's command line."""
        self.folder = folder
        self._dockerd = dockerd
        self._options = options
        self._networks = networks
        self.address = f"unix://{folder}/docker.sock"
        self._group = f"engine-tests-{os.getpid()}-{folder.name}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        (self.folder / "pid").unlink(missing_ok=True)
        arguments = ["--data-root", "root", "--exec-root", "exec", "--pidfile", "pid"]
        arguments = [word if word.startswith("-") else str(self.folder / word) for word in arguments]
        arguments += ["--host", self.address, "--cgroup-parent", f"/{self._group}"]
        arguments += self._options
        if not self._networks:
            arguments += ["--bridge=none", "--iptables=false", "--ip6tables=false", "--userland-proxy=false"]
        inside = 'ip link set lo up; exec "$@"' if self._networks else 'exec "$@"'
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *("unshare", "--net", "--mount", "--propagation", "private"),
                    *("sh", "-c", inside, "sh", self._dockerd, *arguments),
                ],
                stdout=log,
                stderr=log,
                env={"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "HOME": str(self.folder)},
                start_new_session=True,
            )
        wait_until(self._answers, START_TIMEOUT_S, what=f"a Docker engine ({self.folder / 'log'})")

    @property
    def network(self) -> list[str]:
        """Command that runs another one where the ports of its containers are published."""
        assert self._process is not None
        return ["nsenter", f"--net=/proc/{self._process.pid}/ns/net"]

    def docker(self, *words: str) -> str:
        """Output of Docker's own command line."""
        command = ["docker", "--host", self.address, *words]
        env = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "DOCKER_BUILDKIT": "0"}
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60).stdout

    def containers(self) -> list[str]:
        """Ids of all its containers, whatever their state."""
        return self.docker("ps", "--all", "--quiet", "--no-trunc").split()

    def processes(self) -> list[int]:
        """Processes of the engine itself: dockerd, containerd, and a shim for each container that runs."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it ended meanwhile
                line = (entry / "cmdline").read_bytes() if entry.name.isdecimal() else b""
                if str(self.folder).encode() in line and int(entry.name) != os.getpid() and _is_engine(line):
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """SIGKILL for dockerd and containerd. Containers and their shims live on, as after any crash of an engine."""
        self._kill(lambda name: "shim" not in name)
        if self._process is not None:
            self._process.wait(10)
            self._process = None
        # Its parent is gone, and whoever reaps it may be late: its pid in the file would look alive to the next engine.
        (self.folder / "exec" / "containerd" / "containerd.pid").unlink(missing_ok=True)

    def stop(self) -> None:
        """Ends the engine and all its containers."""
        if self._process is not None:
            with contextlib.suppress(subprocess.SubprocessError):
                if found := self.containers():
                    self.docker("rm", "--force", *found)
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(15)
        self._kill(lambda name: True)
        self._kill_containers()
        wait_until(lambda: not self.processes(), 10, what="the end of all processes of the engine")
        for controller in (*CGROUPS.iterdir(), CGROUPS):
            for path, _, _ in os.walk(controller / self._group, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(path)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_containers(self) -> None:
        """Kills what a dead engine could not remove: also paused containers, which end once they are thawed."""
        for procs in CGROUPS.glob(f"*/{self._group}/*/cgroup.procs"):
            with contextlib.suppress(OSError):
                for pid in procs.read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
                (procs.parent / "freezer.state").write_text("THAWED")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
        return (self.folder / "docker.sock").exists() and bool(self._version())

    def _version(self) -> str:
        try:
            return self.docker("version", "--format", "{{.Server.Version}}").strip()
        except subprocess.SubprocessError:
            return ""

    def _kill(self, of: Callable[[str], bool]) -> None:
        for pid in self.processes():
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
                if of(name):
                    os.kill(pid, signal.SIGKILL)


def _is_engine(command_line: bytes) -> bool:
    return Path(command_line.split(b"\0")[0].decode()).name in (
        "dockerd",
        "containerd",
        "containerd-shim-runc-v2",
        "runc",
    )


@contextlib.contextmanager
def docker_engine(
    *, networks: bool = False, dockerd: str = "dockerd", options: Sequence[str] = ()
) -> Iterator[DockerEngine]:
    """An engine that runs. Skips where there can be none, which fails in CI."""
    if reason := why_none():
        import pytest  # late: benchmarks have an engine, too

        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="fs-engine-"))
    engine = DockerEngine(folder, networks=networks, dockerd=dockerd, options=options)
    try:
        engine.start()
        yield engine
    finally:
        engine.stop()


if __name__ == "__main__":
    with docker_engine() as own:
        print(own.address, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
