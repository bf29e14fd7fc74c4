"""A fork server and its workers, driven as the node daemon drives them: real processes, real sockets."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from fleetstart.prefetcher.processes.entered_calls import EnteredCallRing
from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, FunctionName, Version, WorkerId
from fleetstart.runtime.contract.node.channel import Channel, pair
from fleetstart.runtime.contract.node.messages import (
    Assign,
    DeviceBinding,
    Drain,
    Exited,
    Fork,
    Forked,
    ForkServerMessage,
    LauncherReady,
    LauncherUnavailable,
    Pooled,
    Ready,
    StartError,
    Usage,
    WantChunks,
    WorkerMessage,
)
from fleetstart.runtime.contract.worker_headers import DEADLINE_HEADER, REQUEST_HEADER, TOKEN_HEADER
from tests.servers import NO_CERTIFICATES, wait_until

DEADLINE_S = 30.0
"""For each wait; generous, because the machine may be busy."""
NO_HEADERS: Mapping[str, str] = {}
TOKEN = "secret-of-the-test"
USER = 2_000_000_001
"""User id of workers, where the machine has one for them."""


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of the condition; AssertionError after the deadline."""
    return wait_until(condition, DEADLINE_S, what=what)


def receive(channel: Channel[Any]) -> Any:
    until(lambda: select.select([channel], [], [], 0)[0], "messages")
    message, descriptors = channel.receive()
    assert not descriptors
    return message


def alive(pid: int) -> bool:
    """True if it runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


class ForkServerProcess:
    """The process and the daemon's end of its channel."""

    def __init__(
        self,
        profile: str = "python",
        *,
        hide: Sequence[Path] = (),
        through: Sequence[str] = (),
        isolation: str = os.environ.get("FS_ISOLATION", ""),
    ) -> None:
        """`isolation`: its option, the default if empty."""
        ours, theirs = pair()
        self._root = tempfile.TemporaryDirectory(prefix="fs-root-", dir="/var/tmp")  # not in what is shared
        arguments = ["--profile", profile, "--fd", str(theirs.fileno()), "--root", self._root.name, "--user", str(USER)]
        arguments += ["--share", tempfile.gettempdir()]
        if isolation:
            arguments += ["--isolation", isolation]
        for folder in hide:
            arguments += ["--hide", str(folder)]
        command = [*through, sys.executable, "-m", "fleetstart.runtime.launch.forkserver", *arguments]
        environment = {**os.environ, "A_SECRET_OF_THE_DAEMON": "hush"}
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, cwd="/")
        theirs.close()
        self.channel: Channel[ForkServerMessage] = Channel(ours, ForkServerMessage)
        self.exits: dict[str, int] = {}
        self.workers: list[Worker] = []
        said = receive(self.channel)
        self.refused = said.reason if isinstance(said, LauncherUnavailable) else ""
        self.warm = said if isinstance(said, LauncherReady) else LauncherReady(profile, "", self.refused)

    def fork(self, *, network: bool = False, cgroup_procs: Sequence[str] = ()) -> Worker:
        name = WorkerId(f"w-{len(self.workers)}")
        ours, theirs = pair()
        log, log_write = os.pipe()
        self.channel.send(Fork(name, list(cgroup_procs), network), (theirs.fileno(), log_write))
        theirs.close()
        os.close(log_write)
        forked = self._next(lambda message: not isinstance(message, Exited))
        assert isinstance(forked, Forked), forked
        worker = Worker(self, name, forked, ours, log)
        self.workers.append(worker)
        return worker

    def _next(self, wanted: Callable[[Any], bool]) -> Any:
        """The next such message; exits that come before it are noted."""
        while True:
            message = receive(self.channel)
            if isinstance(message, Exited):
                self.exits[message.worker] = message.status
            if wanted(message):
                return message

    def exit_of(self, worker: str) -> int:
        while worker not in self.exits:
            self._next(lambda message: isinstance(message, Exited))
        return self.exits[worker]

    def clear(self) -> None:
        """Ends the workers that a test left, and makes sure that they are gone."""
        for worker in self.workers:
            worker.close()
        if self.process.poll() is None:
            for worker in self.workers:
                self.exit_of(worker.name)
        until(lambda: not any(alive(worker.pid) for worker in self.workers), "the end of all workers")
        self.workers.clear()
        self.exits.clear()

    def close(self) -> None:
        self.clear()
        self.channel.close()
        try:
            assert self.process.wait(DEADLINE_S) is not None
        finally:
            self.process.kill()
            self.process.wait()
            self._root.cleanup()


class Worker:
    """One worker: its control channel, its log, its endpoint."""

    def __init__(self, server: ForkServerProcess, name: WorkerId, forked: Forked, sock: socket.socket, log: int):
        self.server = server
        self.name = name
        self.pid = forked.pid
        self.isolation = forked.isolation
        self.channel: Channel[WorkerMessage] = Channel(sock, WorkerMessage)
        self.url = ""
        self.entered: EnteredCallRing | None = None
        self.wanted: list[WantChunks] = []
        self._log_fd = log
        self._log = b""
        os.set_blocking(log, False)

    def receive(self) -> Any:
        """The next message; what it wants first is kept in `wanted`."""
        try:
            while isinstance(message := receive(self.channel), WantChunks):
                self.wanted.append(message)
            return message
        except Exception as error:
            raise AssertionError(f"{error}; log: {self.log()}") from error

    def pooled(self) -> Worker:
        message = self.receive()
        assert isinstance(message, Pooled)
        assert message.started_ns <= time.monotonic_ns()
        return self

    def assign(
        self,
        bundle: Path,
        entry: str,
        segment: tuple[int, ...] = (),
        adapter_segment: tuple[int, ...] = (),
        threads: int = 1,
        shell: bool = False,
        user: int | None = None,
        binding: DeviceBinding | None = None,
        **spec: Any,
    ) -> None:
        """Of each segment the descriptors: its control block, its slabs."""
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        function = FunctionSpec(name=FunctionName("f"), bundle=BundleId("0" * 64), entry=entry, **spec)
        message = Assign(
            worker=self.name,
            version=Version(1),
            spec=function,
            bundle_dir=str(bundle),
            token=TOKEN,
            threads=threads,
            slabs=[len(descriptors) - 1 for descriptors in (segment, adapter_segment) if descriptors],
            shell=shell,
            binding=binding,
            user=user if user is not None else USER if "uid" in self.isolation.split(",") else 0,
        )
        self.entered = EnteredCallRing()
        self.channel.send(message, (listening.fileno(), self.entered.descriptor, *segment, *adapter_segment))
        listening.close()

    def ready(self) -> Ready:
        message = self.receive()
        assert isinstance(message, Ready), f"{message}; log: {self.log()}"
        return message

    def start_error(self) -> ErrorInfo:
        message = self.receive()
        assert isinstance(message, StartError), message
        return message.error

    def next_usage(self, wanted: Callable[[Usage], bool] = lambda usage: True) -> Usage:
        while True:
            message = self.receive()
            if isinstance(message, Usage) and wanted(message):
                return message

    def next(self, wanted: type[msgspec.Struct]) -> None:
        """Reads until such a message comes."""
        while not isinstance(message := self.receive(), wanted):
            assert isinstance(message, Usage), message

    def client(self, headers: Mapping[str, str] = NO_HEADERS) -> httpx.Client:
        own = {TOKEN_HEADER: TOKEN, REQUEST_HEADER: "inv-test", **headers}
        return httpx.Client(base_url=self.url, headers=own, timeout=DEADLINE_S, trust_env=False, verify=NO_CERTIFICATES)

    def post(
        self,
        value: Any = msgspec.UNSET,
        *,
        path: str = "",
        body: bytes = b"",
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> httpx.Response:
        """A value as JSON, or a body as it is; neither is a call without input."""
        content = body if value is msgspec.UNSET else msgspec.json.encode(value)
        with self.client(headers) as client:
            return client.post(path, content=content)

    def get(self, path: str = "") -> httpx.Response:
        with self.client() as client:
            return client.get(path)

    def drain(self, grace_s: float = DEADLINE_S) -> None:
        self.channel.send(Drain(grace_s))

    def exit_status(self) -> int:
        return self.server.exit_of(self.name)

    def log(self) -> str:
        """All that was written so far."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._log_fd, 65536):
                self._log += data
        return self._log.decode()

    def close(self) -> None:
        """The end of the control socket is the end of the worker."""
        self.channel.close()
        if self._log_fd >= 0:
            self.log()
            os.close(self._log_fd)
            self._log_fd = -1


class Functions:
    """Makes bundles and started workers of them."""

    def __init__(self, server: ForkServerProcess, folder: Path) -> None:
        self.server = server
        self._folder = folder
        self._count = 0

    def bundle(self, source: str, name: str = "handler.py") -> Path:
        self._count += 1
        folder = self._folder / f"bundle-{self._count}"
        folder.mkdir(parents=True)
        (folder / name).write_text(textwrap.dedent(source))
        return folder

    def assigned(self, source: str, entry: str = "f", *, network: bool = False, **settings: Any) -> Worker:
        worker = self.server.fork(network=network).pooled()
        worker.assign(self.bundle(source), f"handler:{entry}", network=network, **settings)
        return worker

    def ready(self, source: str, entry: str = "f", **settings: Any) -> Worker:
        worker = self.assigned(source, entry, **settings)
        worker.ready()
        return worker


DEADLINE = DEADLINE_HEADER.replace("-", "_")


def served(server: ForkServerProcess, folder: Path) -> Iterator[Functions]:
    try:
        yield Functions(server, folder)
    finally:
        server.clear()
