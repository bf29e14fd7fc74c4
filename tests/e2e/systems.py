"""Whole fleetstart system under test: started by `fs up`, driven by `fs` and HTTP, and looked at through /proc.

Everything of one system lies below one short folder: FS_HOME in `home`, TMPDIR in `tmp`. So what a system
leaves behind can be told from what others on the machine do at the same time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import redis

from fleetstart.controller.cli.root import VERBS
from fleetstart.controller.schemas.functions import FunctionInfo, SystemStatus, Usage
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import InvocationRow, LedgerRow, LogLine, PhaseRow
from fleetstart.runtime.contract.errors import ErrorBody, ErrorInfo
from fleetstart.runtime.contract.node.orders import FINAL, WorkerStatus
from tests.e2e.processes import Process, control_groups, listener_inode, processes_of, socket_inodes, stat_of
from tests.forked_main import ForkedMain
from tests.servers import NO_CERTIFICATES, plain_environment, shared_memory, wait_until

FS = (sys.executable, "-P", "-m", "fleetstart.controller.cli")
FORKED = frozenset(VERBS) - {"up", "down", "dev", "shell", "doctor", "node", "dashboard"}
"""Verbs that need no process of their own making: they start none, and have no terminal."""
CLI_TIMEOUT_S = 150
# Brings the system down when whoever started it is gone, however that ended: it holds the other end of stdin.
_GUARD = "import subprocess, sys; sys.stdin.buffer.read(); subprocess.run(sys.argv[1:], timeout=90)"


@dataclass(frozen=True, slots=True)
class Ran:
    """Result of a command of `fs`."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> ErrorInfo:
        """Error of a verb that was called with --json and failed."""
        return msgspec.json.decode(self.err.strip().splitlines()[-1], type=ErrorBody).error


@dataclass(frozen=True, slots=True)
class Driver:
    """Isolation of all functions that a run's tests deploy, where it is not the default (`pytest --isolation`)."""

    isolation: str
    engine: str = ""
    """Address of the container engine, if it needs one."""

    def settings(self, env: Mapping[str, str]) -> dict[str, str]:
        """Settings of a system: its node has a pool of this isolation for each kind of workers that the test asked
        for."""
        kinds = env.get("FS_PROFILES", "python,torch").split(",")
        own = [f"{kind}+{self.isolation}" for kind in kinds if kind in ("python", "torch")]
        profiles = {"FS_PROFILES": ",".join(dict.fromkeys((*kinds, *own)))}
        return {"FS_CONTAINER_ENGINE": self.engine, **profiles} if self.engine else profiles


driver: Driver | None = None
"""Set once, by the fixture of a run (tests/e2e/conftest.py)."""


def driver_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Settings of the run's driver for a system that a test asks for with these."""
    return driver.settings(env) if driver is not None else {}


def isolation() -> str:
    """Isolation of the run's functions, of those that name none themselves."""
    return driver.isolation if driver is not None else "namespaces"


def with_driver(*arguments: str) -> tuple[str, ...]:
    """A command of `fs`, with the run's driver if it reads or deploys a handler and names none itself."""
    reads = arguments[:1] in (("deploy",), ("dev",)) or arguments[:2] == ("config", "show")
    if driver is None or not reads or "--isolation" in arguments:
        return arguments
    return (*arguments, "--isolation", driver.isolation)


def run_fs(
    arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path, code: int | None, through: Sequence[str] = ()
) -> Ran:
    """Runs a command of `fs` to its end, by the command `through` if there is one. Errors: AssertionError if it exits
    with another code, unless that is None."""
    done = subprocess.run(
        [*through, *FS, *arguments], env=env, capture_output=True, text=True, timeout=CLI_TIMEOUT_S, cwd=cwd
    )
    if code is not None:
        assert done.returncode == code, f"fs {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return Ran(done.returncode, done.stdout, done.stderr)


class System:
    def __init__(self, *, env: Mapping[str, str] | None = None) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="fs-e2e-"))
        self.home = self.root / "home"
        self.tmp = self.root / "tmp"
        self.tmp.mkdir()
        hidden = plain_environment()
        self.through: list[str] = []
        """Command that `fs` is run by, if any."""
        # Memory made ahead would be made anew for each of these short lives.
        settings = {"FS_HOME": str(self.home), "TMPDIR": str(self.tmp), "FS_POOL_MEMORY": "32MiB"}
        self.env = {**hidden, **settings, **(env or {}), **driver_settings(env or {})}
        self.url = ""
        self.http = httpx.Client(trust_env=False, timeout=60, verify=NO_CERTIFICATES)
        self._shm_before = shared_memory()
        self._daemons: set[int] = set()
        self._deployed: set[str] = set()
        self._guard: subprocess.Popen[bytes] | None = None

    # ── the command line ───────────────────────────────────────────────────────────────────────────

    def fs(self, *arguments: str, code: int | None = 0, cwd: Path | None = None) -> Ran:
        arguments = with_driver(*arguments)
        if not self.through and arguments and arguments[0] in FORKED:
            return self._forked_fs(*arguments, code=code, cwd=cwd)
        return run_fs(arguments, env=self.env, cwd=cwd or self.root, code=code, through=self.through)

    def _forked_fs(self, *arguments: str, code: int | None, cwd: Path | None) -> Ran:
        with tempfile.TemporaryDirectory(prefix="fs-said-") as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            process = ForkedMain(
                "fleetstart.controller.cli.root:run", arguments, env=self.env, out=out, err=err, cwd=cwd or self.root
            )
            try:
                found = process.wait(CLI_TIMEOUT_S)
            finally:
                process.kill()
            ran = Ran(found, out.read_text(), err.read_text())
        if code is not None:
            assert ran.code == code, f"fs {' '.join(arguments)}: {ran.code}\n{ran.out}\n{ran.err}"
        return ran

    def up(self) -> str:
        """Open: its home has no key until a test makes one."""
        if self._guard is None:
            argv = [sys.executable, "-c", _GUARD, *FS, "down"]
            self._guard = subprocess.Popen(argv, env=self.env, stdin=subprocess.PIPE, start_new_session=True)
        self.url = self.fs("up", "--port", "0", *([] if (self.home / "key").exists() else ["--open"])).out.strip()
        self.http.base_url = httpx.URL(self.url)
        self.processes()
        return self.url

    def down(self) -> None:
        self.processes()
        self.fs("down")

    def close(self) -> None:
        """Ends everything and removes it, whatever state it is in."""
        try:
            if self.processes():
                self.fs("down")
        finally:
            self.http.close()
            if self._guard is not None:
                self._guard.kill()
                self._guard.wait()
                assert self._guard.stdin is not None
                self._guard.stdin.close()
            shutil.rmtree(self.root, ignore_errors=True)

    # ── functions ──────────────────────────────────────────────────────────────────────────────────

    def source(self, text: str, *, folder: str) -> Path:
        """A handler file of its own."""
        path = self.root / "src" / folder / "handler.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def deploy(self, text: str, *, name: str, options: tuple[str, ...] = ()) -> str:
        """Deploys the one function of a handler's source; returns its name. A new one has no worker until its first
        call: what starts are like is for the tests to see."""
        first = () if name in self._deployed else ("--no-probe",)
        self._deployed.add(name)
        self.deploy_file(self.source(text, folder=name), "--name", name, *first, *options)
        return name

    def deploy_file(self, handler: Path, *options: str) -> list[dict[str, Any]]:
        ran = self.fs("deploy", str(handler), *options, "--json")
        return list(msgspec.json.decode(ran.out))

    def refused(self, handler: Path, *options: str) -> ErrorInfo:
        """The error of a deploy that must not succeed."""
        return self.fs("deploy", str(handler), *options, "--json", code=1).error

    def call(
        self, name: str, body: Any = None, *, path: str = "", timeout_s: float = 60, **headers: str
    ) -> httpx.Response:
        return self.http.post(f"/fn/{name}{path}", json=body, headers=headers, timeout=timeout_s)

    def ok(self, name: str, body: Any = None, **rest: Any) -> Any:
        response = self.call(name, body, **rest)
        assert response.status_code == 200, response.text
        return response.json()

    def failed(self, name: str, body: Any = None, **rest: Any) -> tuple[int, ErrorInfo]:
        response = self.call(name, body, **rest)
        return response.status_code, error_in(response)

    # ── what it says of itself ─────────────────────────────────────────────────────────────────────

    def status(self) -> SystemStatus:
        return msgspec.json.decode(self.http.get("/api/v1/status").content, type=SystemStatus)

    def info(self, name: str) -> FunctionInfo:
        return msgspec.json.decode(self.http.get(f"/api/v1/functions/{name}").content, type=FunctionInfo)

    def usage(self, name: str) -> Usage:
        return msgspec.json.decode(self.http.get("/api/v1/usage", params={"function": name}).content, type=Usage)

    def logs(self, name: str, tail: int = 1000) -> list[LogLine]:
        answer = self.http.get(f"/api/v1/functions/{name}/logs", params={"tail": tail})
        return [msgspec.json.decode(line, type=LogLine) for line in answer.content.splitlines() if line]

    def redis(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.home / "run" / "redis.sock"), socket_timeout=5)

    def ledger(self) -> list[LedgerRow]:
        """Every row there is, as it lies in Redis."""
        with self.redis() as client:
            entries: Any = client.xrange(keys.LEDGER)
        return [msgspec.json.decode(fields[b"row"], type=LedgerRow) for _, fields in entries]

    def invocations(self) -> list[InvocationRow]:
        return [row for row in self.ledger() if isinstance(row, InvocationRow)]

    def phases(self, name: str, phase: str = "") -> list[PhaseRow]:
        rows = [row for row in self.ledger() if isinstance(row, PhaseRow) and row.function == name]
        return [row for row in rows if not phase or row.phase == phase]

    def open_invocations(self) -> int:
        with self.redis() as client:
            count: Any = client.hlen(keys.OPEN)
        return int(count)

    def deaths(self) -> dict[str, int]:
        """Number of ends of each part since `fs up`."""
        services = msgspec.json.decode((self.home / "run" / "services.json").read_bytes())
        return {name: record["deaths"] for name, record in services.items()}

    def log_tails(self) -> str:
        parts = []
        for path in sorted((self.home / "logs").glob("*.log")):
            parts.append(f"── {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-40:]))
        return "\n".join(parts)

    # ── its processes ──────────────────────────────────────────────────────────────────────────────

    def processes(self) -> list[Process]:
        """Processes that name this system in their environment or command line: also those that lost their parent."""
        guard = self._guard.pid if self._guard is not None else 0
        found = [process for process in processes_of(str(self.home)) if process.pid not in (os.getpid(), guard)]
        # Control groups are named after the daemon's process: they are looked for when it has gone.
        self._daemons |= {process.pid for process in found if process.kind == "node"}
        return found

    def of_kind(self, kind: str) -> list[Process]:
        return [process for process in self.processes() if process.kind == kind]

    def one(self, kind: str) -> Process:
        found = self.of_kind(kind)
        assert len(found) == 1, found
        return found[0]

    def live_workers(self) -> list[WorkerStatus]:
        """Live workers of all functions, as the controller knows them."""
        workers = [worker for info in self.status().functions for worker in info.workers]
        return [worker for worker in workers if worker.state not in FINAL]

    def worker_processes(self, name: str) -> list[Process]:
        """Processes that are ready to serve the function, known by the socket that they listen on; in sandboxes, which
        their launchers' children are and name no system, by what the node says of them."""
        if driver is not None:
            return self._sandboxed(name)
        endpoints = [worker.endpoint for worker in self.info(name).workers if worker.state == "ready"]
        inodes = {listener_inode(int(endpoint.rpartition(":")[2])) for endpoint in endpoints}
        return [process for process in self.of_kind("worker") if socket_inodes(process.pid) & inodes]

    def _sandboxed(self, name: str) -> list[Process]:
        ready = {worker.worker for worker in self.info(name).workers if worker.state == "ready"}
        found = []
        for line in (self.home / "logs" / "node.log").read_text().splitlines():
            _, said, fields = line.partition(": worker ready ")
            known = msgspec.json.decode(fields) if said else {}
            if known.get("worker") in ready and (stat := stat_of(known["pid"])) is not None:
                found.append(Process(known["pid"], stat[1], "worker", stat[0]))
        return found

    def kill(self, process: Process) -> None:
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not process.alive, what=f"end of {process}")

    # ── what it leaves ─────────────────────────────────────────────────────────────────────────────

    def litter(self) -> list[str]:
        """Leftovers that should not be there once the system is down."""
        found = [f"process {process}" for process in self.processes()]
        found += [f"/dev/shm/{name}" for name in sorted(shared_memory() - self._shm_before)]
        found += [f"temporary file {path}" for path in sorted(self.tmp.iterdir())]
        found += [f"in FS_HOME: {path}" for path in self.home.glob("run/**/*")]
        found += [str(path) for pid in self._daemons for path in control_groups(pid)]
        return found


def error_in(response: httpx.Response) -> ErrorInfo:
    return msgspec.json.decode(response.content, type=ErrorBody).error


@contextmanager
def running(*, env: Mapping[str, str] | None = None) -> Iterator[System]:
    """A system that is up; when the block is left it is brought down and must leave nothing behind."""
    system = System(env=env)
    try:
        system.up()
        yield system
        system.down()
        litter = system.litter()
        assert litter == [], litter
    except BaseException:
        print(system.log_tails())
        raise
    finally:
        system.close()
