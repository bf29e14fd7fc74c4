"""System of its own for a benchmark: `fs up` in a private FS_HOME, `fs down` at the end, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis

from fleetstart.controller.auth.owner_key_file import read_key_file
from fleetstart.controller.cli.home import HomeLayout, read_services
from tests.bench.harness.samples import ROOT
from tests.bench.harness.wire import Connection

OWN_FS = (sys.executable, "-m", "fleetstart.controller.cli")
"""The command line of this checkout."""
COMMAND_S = 120.0
POLL_S = 0.01
SETTLE_S = 0.8
"""After the last worker has gone: a spare worker in place of the one that was used is forked half a second later."""


class System:
    def __init__(self, home: Path, url: str, fs: Sequence[str] = OWN_FS) -> None:
        self.home = home
        self.url = url
        self._fs = fs
        self.host, self.port = urlsplit(url).hostname or "", urlsplit(url).port or 0
        key = read_key_file(HomeLayout(home).key)
        self.shown = {"authorization": f"Bearer {key}"} if key else {}
        """What each caller shows: the owner's key, or nothing where the system is open."""
        self._api = self.connect()

    def connect(self) -> Connection:
        return Connection(self.host, self.port, headers=self.shown)

    def api(self, path: str) -> Any:
        """GET under /api/v1; the connection is made anew if it was cut."""
        for attempt in (1, 2):
            try:
                return json.loads(self._api.get(f"/api/v1{path}").expect().body)
            except ConnectionError:
                if attempt == 2:
                    raise
                self._api = self.connect()
        raise AssertionError

    def fs(self, *arguments: str) -> str:
        return _run_fs(self._fs, self.home, *arguments)

    def deploy(self, handler: str, *flags: str) -> str:
        """The invoke path, such as /fn/hello. Nothing is started: benchmarks measure starts."""
        return urlsplit(self.fs("deploy", str(ROOT / handler), "--no-probe", *flags).split()[-1]).path

    def function(self, name: str) -> Any:
        return self.api(f"/functions/{name}")

    def wait(self, what: str, predicate: Callable[[], Any], deadline_s: float = 60.0) -> Any:
        ends = time.monotonic() + deadline_s
        while not (value := predicate()):
            if time.monotonic() > ends:
                raise TimeoutError(f"{what}: not so after {deadline_s:g} s")
            time.sleep(POLL_S)
        return value

    def wait_asleep(self, name: str) -> None:
        """No worker, and then a moment for the node to come to rest."""
        self.wait(f"{name} without workers", lambda: not self.function(name)["workers"])
        time.sleep(SETTLE_S)

    def spares_made(self, pool: str) -> int:
        """Workers of a pool that the node has started ahead, so far."""
        lines = (self.home / "logs" / "node.log").read_text(errors="replace").splitlines()
        return sum("worker preforked" in line and f'"{pool}"' in line for line in lines)

    def prepared_made(self, name: str) -> int:
        """Workers that the node has prepared for a version of a function, so far."""
        lines = (self.home / "logs" / "node.log").read_text(errors="replace").splitlines()
        return sum("spare worker prepared" in line and f'"{name}@' in line for line in lines)

    def trace(self, request_id: str) -> Any:
        """The invocation's trace, once it is written."""

        def read() -> Any:
            answer = self._api.get(f"/api/v1/invocations/{request_id}")
            return json.loads(answer.body) if answer.status == 200 else None

        return self.wait(f"trace of {request_id}", read, 10.0)

    def processor_ms(self, service: str) -> float:
        """Processor time that all threads of a service have used so far."""
        threads = Path(f"/proc/{read_services(HomeLayout(self.home))[service].pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e6

    def ready_worker(self, name: str) -> tuple[str, str]:
        """Endpoint and secret of a ready worker, from the observed state: what a gateway calls it by."""
        record = json.loads((self.home / "run" / "supervisor.json").read_bytes())
        with contextlib.closing(redis.Redis.from_url(record["redis_url"])) as client:
            for node in client.hkeys("fs:nodes"):
                for raw in client.hvals(f"fs:observed:{node.decode()}"):  # type: ignore[union-attr]
                    status = json.loads(raw)
                    if status["function"] == name and status["state"] == "ready":
                        return status["endpoint"], status["token"]
        raise LookupError(f"{name} has no ready worker")

    def restart_node(self) -> None:
        """An empty node: its memory, and so every segment, goes with the daemon; the supervisor starts another."""
        before = self.api("/status")["nodes"][0]
        os.kill(before["pid"], signal.SIGTERM)

        def warm_again() -> bool:
            nodes = self.api("/status")["nodes"]
            return bool(nodes) and nodes[0]["epoch"] != before["epoch"] and nodes[0]["profiles"] == before["profiles"]

        self.wait("a warm node", warm_again)

    def evict_store(self) -> None:
        """The store's files out of the page cache, so that a fetch reads the disk."""
        evict(self.home / "store")


def evict(folder: Path) -> None:
    for path in folder.rglob("*") if folder.is_dir() else (folder,):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def running(profile: str, *, is_open: bool = False, fs: Sequence[str] = OWN_FS, **settings: str) -> Iterator[System]:
    """`profile` is what its only fork server has imported; `is_open`: without the key that a system has by default;
    `fs` is the command line
    of the release that is run; `settings` are FS_* variables, such as FS_POOL_SIZE="0"."""
    up = ("up", *(["--open"] if is_open else []), "--port", "0", "--json")
    with tempfile.TemporaryDirectory(prefix="fs-bench-") as folder:
        home = Path(folder) / "home"
        try:
            url = json.loads(_run_fs(fs, home, *up, FS_PROFILES=profile, **settings))["url"]
            system = System(home, url, fs)
            system.wait("a warm fork server", lambda: _is_warm(system))
            yield system
        finally:
            _run_fs(fs, home, "down")


def _is_warm(system: System) -> bool:
    nodes = system.api("/status")["nodes"]
    return bool(nodes and nodes[0]["profiles"])


def _run_fs(fs: Sequence[str], home: Path, *arguments: str, **settings: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FS_") or name == "FS_ISOLATION"}
    argv = [*fs, *arguments]
    env = {**clean, **settings, "FS_HOME": str(home)}
    said = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_S)
    if said.returncode:
        raise RuntimeError(f"fs {' '.join(arguments)} ended with {said.returncode}: {said.stderr.strip()}")
    return said.stdout
