"""Processes of a bed: anything that runs on one of its hosts, and a node with what it reports.

A part is started and ended by hand; nothing starts it again. Each has a folder: `home` is its FS_HOME, `tmp` its
TMPDIR (by which its processes are told), `log` what it prints.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import redis

from fleetstart.prefetcher.config import read_config
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.identity import FILE, read_identity, write_identity
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.orders import WorkerStatus
from fleetstart.runtime.contract.node.reports import NodeReport
from tests.e2e.processes import socket_inodes
from tests.e2e.systems import isolation
from tests.servers import wait_until
from tests.testbed import guard
from tests.testbed.network import Network

PYTHON = (sys.executable, "-P", "-m")
STOP_S = 12.0
"""A node says where it hangs and goes after nine."""
START_S = 60.0
LOG_TAIL_LINES = 40


class Part:
    """One process on one host of the bed."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        network: Network,
        host: str,
        folder: Path,
        env: Mapping[str, str],
        descriptors: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.host = host
        self.folder = folder
        self.home = folder / "home"
        self.tmp = folder / "tmp"
        self.log_path = folder / "log"
        self.env = {**env, "FS_HOME": str(self.home), "TMPDIR": str(self.tmp)}
        self.argv = argv
        """Both may be changed; the next start takes them."""
        self.process: subprocess.Popen[bytes] | None = None
        self._network = network
        self._descriptors = descriptors
        for path in (self.home, self.tmp):
            path.mkdir(parents=True, exist_ok=True)

    @property
    def address(self) -> str:
        return self._network.addresses[self.host]

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was not started"
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Returns at once; see `ready` of each kind."""
        assert not self.alive, f"{self.name} runs as process {self.pid}"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self._network.entered(self.host, self.argv),
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
                pass_fds=self._descriptors,
                start_new_session=True,  # Ctrl-C is for the bed, which ends its parts in order
            )

    def stop(self) -> None:
        """Ends the part in order: SIGTERM, and SIGKILL if it does not end."""
        self.ask_to_stop()
        self.wait_stopped()

    def ask_to_stop(self) -> None:
        if self.alive:
            self.send(signal.SIGTERM)
            self.send(signal.SIGCONT)

    def wait_stopped(self) -> None:
        if self.process is None:
            return
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL, of this one process: what becomes of its children is its own affair."""
        if self.alive:
            self.send(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(STOP_S)

    def pause(self) -> None:
        """Stops the process until `resume`; the kernel goes on taking connections and bytes for it."""
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None, f"{self.name} was not started"
        self.process.send_signal(number)

    def processes(self) -> list[int]:
        """The part's own process and those that it started, also if they lost their parent."""
        return guard.members(self.folder)

    def check(self) -> None:
        """AssertionError with its last words if it has ended."""
        assert self.alive, f"{self.name} ended with {self.process and self.process.returncode}:\n{self.log_tail()}"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self) -> str:
        return "\n".join(self.log().splitlines()[-LOG_TAIL_LINES:])


class Node(Part):
    """A host with a node daemon."""

    def __init__(
        self, index: int, *, network: Network, folder: Path, env: Mapping[str, str], redis: Callable[[], redis.Redis]
    ) -> None:
        name = f"node-{index}"
        own = {"FS_NODE": name, "FS_NODE_ADDRESS": network.addresses[name]}
        argv = (*PYTHON, "fleetstart.prefetcher")
        super().__init__(name, argv, network=network, host=name, folder=folder, env={**env, **own})
        self.index = index
        self.id = NodeId(name)
        self._redis = redis

    def start(self) -> None:
        super().start()
        # Before anything can go wrong: the groups of a daemon that is killed are found by this.
        with (self.folder.parent / guard.DAEMONS).open("a") as daemons:
            daemons.write(f"{self.pid}.{guard.ticks_of(self.pid)}\n")

    def ready(self) -> bool:
        """True once the node has its lease, and warm fork servers for all its profiles."""
        self.check()
        report = self.report()
        asked = read_config(self.env).profiles
        return report is not None and report.pid == self.pid and set(asked) <= set(report.profiles)

    def wait_ready(self) -> None:
        wait_until(self.ready, START_S, what=f"{self.name} to be ready")

    def restart(self) -> None:
        """Ready again when this returns."""
        self.stop()
        self.start()
        self.wait_ready()

    def lose(self) -> None:
        """Kills all processes at once, as if the host lost its power."""
        pids = self.processes()
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none sees another one's end
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self.kill()
        wait_until(lambda: not self.processes(), STOP_S, what=f"end of {self.name}'s processes")

    def forget(self) -> None:
        """Removes what the node keeps on its disk: bundles, checkpoints, but for its identity. Only while it does not
        run."""
        assert not self.alive
        path = self.home / "node" / FILE
        identity = read_identity(path)
        shutil.rmtree(self.home)
        self.home.mkdir()
        if identity is not None:
            write_identity(path, identity)

    # ── what it says ───────────────────────────────────────────────────────────────────────────────

    def report(self) -> NodeReport | None:
        """None once its lease is gone."""
        with self._redis() as client:
            data: Any = client.get(keys.node(self.id))
        return msgspec.json.decode(data, type=NodeReport) if data else None

    def statuses(self) -> list[WorkerStatus]:
        """Statuses of the node's workers, also of those that have ended and are not forgotten yet."""
        with self._redis() as client:
            rows: Any = client.hvals(keys.observed(self.id))
        return [msgspec.json.decode(row, type=WorkerStatus) for row in rows]

    def pid_of(self, worker: WorkerStatus) -> int:
        """The process that serves it, told by its node's log once it was ready, else by the socket of its links, which
        the node hands over to it while it starts."""
        what = f"a process of {self.name} that listens for {worker.worker} at {worker.endpoint or worker.link!r}"
        found = wait_until(lambda: self._pids_of(worker), what=what)
        return min(found, key=guard.ticks_of)  # its own children may hold the socket too

    def _pids_of(self, worker: WorkerStatus) -> list[int]:
        told = re.findall(rf'worker ready \{{"worker": "{worker.worker}".*?"pid": (\d+)', self.log())
        if told and (
            int(told[-1]) in self.processes() or isolation() == "container"
        ):  # those are the engine's children
            return [int(told[-1])]
        sockets = {inode for inode in map(self._listener, (worker.endpoint, worker.link)) if inode}
        return [pid for pid in self.processes() if pid != self.pid and sockets & socket_inodes(pid)]

    def kill_worker(self, worker: WorkerStatus) -> None:
        os.kill(self.pid_of(worker), signal.SIGKILL)

    def _listener(self, endpoint: str) -> str:
        """Inode of the socket of this host that listens there; empty if there is none."""
        port = endpoint.rpartition(":")[2]
        for line in Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            if port and words[3] == "0A" and int(words[1].partition(":")[2], 16) == int(port):
                return words[9]
        return ""
