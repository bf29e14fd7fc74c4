"""Testbed: a whole fleetstart over several hosts, each with a link of its own, on this one machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from base64 import b64encode
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec
import redis

from fleetstart.controller.identity.certificates import new_request
from fleetstart.controller.schemas.functions import FunctionInfo, SystemStatus
from fleetstart.controller.schemas.nodes import JoinTerms
from fleetstart.runtime.contract.identity import FILE, Identity, write_identity
from fleetstart.runtime.contract.node.orders import FINAL, WorkerStatus
from fleetstart.runtime.contract.node.reports import NodeReport
from tests.bench.harness.range_server import credentials
from tests.e2e.systems import Ran, driver_settings, run_fs, with_driver
from tests.servers import listening_socket, shared_memory, valkey_binary, wait_until
from tests.testbed import guard
from tests.testbed.network import Network
from tests.testbed.parts import PYTHON, START_S, Node, Part

PREFIX = "10.77.0"
CONTROL, STORE = "control", "store"
BUCKET = "fleet"
STORE_PORT, REDIS_PORT = 9000, 6379
GONE_S = 20.0

# localbucket lets five connections wait to be taken, and the sixth tries again after a second: fewer than a node opens.
_STORE = "import localbucket, socketserver; socketserver.TCPServer.request_queue_size = 1024; localbucket.main()"

Answer = TypeVar("Answer")
Place = int | str
"""A host: the number of a node, or `control` (controller and Redis), or `store`."""


class Testbed:
    """Hosts `node-0`, `node-1`..., `store` and `control`; a context manager.

    Units:   mbit is the rate of each node's link, 10^6 bit/s each way, headers included: TCP's streams get 95% of it.
             0 is no limit; store and control have none.
    Errors:  NoNamespaces if this machine has none. On leaving, AssertionError if anything but the bed's own folder
             was left behind, unless the block itself failed.

    `env` goes to controllers and nodes, over what is set here: no disk cache, 32 MiB of weights' memory made ahead.
    `controllers` are their hosts: one that is not `control` is apart from Redis. `others` are hosts without a part.
    """

    __test__ = False  # pytest, not a test for you

    def __init__(
        self,
        *,
        nodes: int = 4,
        mbit: float = 200,
        env: Mapping[str, str] | None = None,
        controllers: Sequence[str] = (CONTROL,),
        others: Sequence[str] = (),
        nodes_down: bool = False,
    ) -> None:
        """`nodes_down`: nodes are not started with the rest, but by `chill`."""
        guard.sweep()
        self._nodes_down = nodes_down
        hosts = [f"node-{index}" for index in range(nodes)]
        self.mbit = mbit
        apart = [host for host in controllers if host != CONTROL]
        self.network = Network([CONTROL, STORE, *hosts, *apart, *others], prefix=PREFIX)
        self.folder = Path(tempfile.mkdtemp(prefix=guard.folder_prefix()))
        self._guard = _start_guard(self.folder, self.network)
        self._shm_before = shared_memory()
        self._listeners = [listening_socket() for _ in controllers]
        self.urls = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in self._listeners]
        """Of the controllers, on this machine."""
        self.url = self.urls[0]
        # Without limits: more callers than a pool's connections make it close some that others have just taken.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=60, limits=limits)
        self.bucket = self.folder / STORE / "buckets" / BUCKET
        """The store's objects as files."""
        self.bucket.mkdir(parents=True)
        self.store_url = f"http://{self.network.addresses[STORE]}:{STORE_PORT}"
        for host in hosts:
            self.network.limit(host, mbit)

        plain = {name: value for name, value in os.environ.items() if not _machines_own(name)}
        self._master_key = b64encode(os.urandom(32)).decode()
        """Of all controllers: each vouches for the nodes that another has let join."""
        settings = {
            "FS_REDIS_URL": f"redis://{self.network.addresses[CONTROL]}:{REDIS_PORT}",
            "FS_STORE": f"s3://{BUCKET}",
            "FS_URL": self.url,
            "FS_POOL_MEMORY": "32MiB",
            "FS_NODE_MEMORY": "4GiB",
            "FS_DISK_CACHE": "0",
            **credentials(self.store_url),
        }
        self.env = {**plain, **settings, **(env or {}), **driver_settings(env or {})}
        self.redis_server = self._part("redis", CONTROL, self._redis_argv(), plain)
        self.store = self._part("store", STORE, self._store_argv(), plain)
        self.controllers = [
            self._controller(number, host, url, listener.fileno())
            for number, (host, url, listener) in enumerate(zip(controllers, self.urls, self._listeners, strict=True))
        ]
        self.controller = self.controllers[0]
        self.nodes = [
            Node(index, network=self.network, folder=self.folder / host, env=self.env, redis=self.redis)
            for index, host in enumerate(hosts)
        ]

    def _part(self, name: str, host: str, argv: Sequence[str], env: Mapping[str, str], *descriptors: int) -> Part:
        folder = self.folder / name
        return Part(name, argv, network=self.network, host=host, folder=folder, env=env, descriptors=descriptors)

    def _controller(self, number: int, host: str, url: str, listener: int) -> Part:
        env = {
            **self.env,
            "FS_URL": url,
            "FS_LISTEN_FD": str(listener),
            "FS_OPEN": "1",
            "FS_MASTER_KEY": self._master_key,
        }
        name = f"controller-{number}" if number else "controller"
        return self._part(name, host, (*PYTHON, "fleetstart.controller"), env, listener)

    def _redis_argv(self) -> list[str]:
        address = self.network.addresses[CONTROL]
        options = (
            f"--bind {address} --port {REDIS_PORT} --protected-mode no --unixsocket {self._redis_socket} "
            f"--dir {self.folder / 'redis' / 'home'} --appendonly yes --appendfsync everysec --set-proc-title no --save"
        )
        return [str(valkey_binary()), *options.split(), ""]

    def _store_argv(self) -> list[str]:
        address = self.network.addresses[STORE]
        options = f"--host {address} --port {STORE_PORT} {self.bucket.parent}"
        return [sys.executable, "-P", "-c", _STORE, *options.split()]

    # ── its life ───────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> Self:
        try:
            self.up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None:
                print(self.log_tails())
            self.down()
            left = self.leftovers()
        finally:
            self.close()
        assert kind is not None or left == [], left

    def up(self) -> None:
        """Starts all parts, and waits until nodes have leases and warm fork servers and the controller knows them."""
        self.redis_server.start()
        self.store.start()
        for node in self.nodes[: 0 if self._nodes_down else None]:
            node.start()
        wait_until(self._redis_answers, START_S, what="Redis")
        for controller in self.controllers:
            controller.start()
        wait_until(self._controller_answers, START_S, what="controller")
        for node in self.nodes:
            if node.env.get("FS_LINKS") != "plain":  # else it has not waited
                self.vouch(node)
        wait_until(self._store_listens, START_S, what="store")
        if not self._nodes_down:
            self.wait_ready()

    def vouch(self, node: Node) -> None:
        """Lets a node join, as `fs node join` does; it waits for what this writes."""
        key, request = new_request(node.name)
        answer = self.http.post("/api/v1/nodes/join", json={"node": node.name, "request": request})
        assert answer.status_code == 200, answer.text
        terms = msgspec.json.decode(answer.content, type=JoinTerms)
        identity = Identity(certificate=terms.certificate, key=key, authority=terms.authority)
        write_identity(node.home / "node" / FILE, identity)

    def down(self) -> None:
        """Parts end in order, as `fs down` ends them; folder and network stay. Not for a bed that shall go up again."""
        for controller in self.controllers:
            controller.stop()
        _stop_together(self.nodes)
        self.store.stop()
        self.redis_server.stop()

    def close(self) -> None:
        """Ends everything at once and removes it, whatever state it is in."""
        self.http.close()
        for listener in self._listeners:
            listener.close()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(guard.GRACE_S + 3 * guard.KILLED_S)
        for part in self.parts:
            part.kill()  # reaped; the guard has killed it
        self.network.close()

    @property
    def parts(self) -> list[Part]:
        return [*self.controllers, *self.nodes, self.store, self.redis_server]

    def leftovers(self) -> list[str]:
        """Leftovers of a bed that is down, which should be none. A killed daemon's groups are its successor's."""
        namespaces = self.network.namespaces
        found = [f"process {_words(pid)}" for pid in guard.members(self.folder, namespaces) if pid != self._guard.pid]
        found += [f"/dev/shm/{name}" for name in sorted(shared_memory() - self._shm_before)]
        found += [f"temporary file {path}" for part in self.parts for path in sorted(part.tmp.iterdir())]
        clean = {f"fleetstart-{node.pid}." for node in self.nodes if node.process and node.process.returncode == 0}
        found += [str(path) for path in guard.groups_of(self.folder) if path.name.startswith(tuple(clean))]
        return found

    # ── use ────────────────────────────────────────────────────────────────────────────────────────

    def fs(self, *arguments: str, code: int | None = 0, cwd: Path | None = None) -> Ran:
        """Runs the command line against this bed, as a user of this machine."""
        env = {**os.environ, "FS_URL": self.url, "FS_HOME": str(self.folder / "user")}
        return run_fs(with_driver(*arguments), env=env, cwd=cwd or self.folder, code=code)

    def redis(self) -> redis.Redis:
        """Redis past the network: reachable also when links are cut."""
        return redis.Redis(unix_socket_path=str(self._redis_socket), socket_timeout=5)

    def status(self) -> SystemStatus:
        return self._get("/api/v1/status", SystemStatus)

    def info(self, name: str) -> FunctionInfo:
        return self._get(f"/api/v1/functions/{name}", FunctionInfo)

    def _get(self, path: str, kind: type[Answer]) -> Answer:
        response = self.http.get(path)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text}"
        return msgspec.json.decode(response.content, type=kind)

    def workers(self, name: str = "") -> list[WorkerStatus]:
        """Live workers of one function or of all, as the controller knows them."""
        found = [worker for info in self.status().functions if name in ("", info.name) for worker in info.workers]
        return [worker for worker in found if worker.state not in FINAL]

    def node(self, place: Place) -> Node:
        return next(node for node in self.nodes if node.name == self.host(place))

    def report(self, place: Place) -> NodeReport | None:
        return self.node(place).report()

    def host(self, place: Place) -> str:
        name = f"node-{place}" if isinstance(place, int) else place
        assert name in self.network.addresses, f"no host {place!r}; there are {', '.join(self.network.addresses)}"
        return name

    def run(self, place: Place, *argv: str, timeout_s: float = 60, **popen: Any) -> subprocess.CompletedProcess[str]:
        """A command on that host, to its end."""
        tmp = self.folder / "run" / "tmp"
        tmp.mkdir(parents=True, exist_ok=True)
        env = {**self.env, "TMPDIR": str(tmp)}
        command = self.network.entered(self.host(place), argv)
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, **popen)

    def log_tails(self) -> str:
        return "\n".join(f"── {part.name}\n{part.log_tail()}" for part in self.parts)

    # ── harm ───────────────────────────────────────────────────────────────────────────────────────

    def limit(self, place: Place, mbit: float) -> None:
        self.network.limit(self.host(place), mbit)

    def cut(self, place: Place) -> None:
        """Cuts the host off: nothing reaches it nor leaves it, and no peer gets an error."""
        self.network.cut(self.host(place))

    def mend(self, place: Place) -> None:
        self.network.mend(self.host(place))

    def cut_between(self, one: Place, other: Place) -> None:
        """The two reach everyone but each other."""
        self.network.cut_between(self.host(one), self.host(other))

    def mend_between(self, one: Place, other: Place) -> None:
        self.network.mend_between(self.host(one), self.host(other))

    def part(self) -> None:
        """No node reaches another one any more; all of them reach store, Redis and controller."""
        for one, other in combinations(self.nodes, 2):
            self.cut_between(one.name, other.name)

    def join(self) -> None:
        for one, other in combinations(self.nodes, 2):
            self.mend_between(one.name, other.name)

    def stall_store(self) -> None:
        """Stalls the store: it takes connections and requests, and answers none."""
        self.store.pause()

    def resume_store(self) -> None:
        self.store.resume()

    def chill(self, nodes: int | None = None) -> None:
        """Nodes forget segments, disk caches and bundles, and the controller that functions were wanted a moment ago.

        No worker is left, and none comes until the next call, which is cold everywhere. With a number, only the first
        so many nodes run from then on.
        """
        _stop_together(self.nodes)
        # A new controller begins with the workers that are there, and would go on wanting as many.
        wait_until(lambda: not self.workers(), GONE_S, what="end of all workers")
        self.controller.stop()
        self.controller.start()
        for node in self.nodes:
            node.forget()
        for node in self.nodes[:nodes]:
            node.start()
        self.wait_ready(nodes)

    # ── readiness ──────────────────────────────────────────────────────────────────────────────────

    @property
    def _redis_socket(self) -> Path:
        return self.folder / "redis.sock"

    def _redis_answers(self) -> bool:
        self.redis_server.check()
        try:
            with self.redis() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def _controller_answers(self) -> bool:
        self.controller.check()
        try:
            return self.status().redis == "ok"
        except httpx.TransportError:
            return False

    def _store_listens(self) -> bool:
        self.store.check()
        with self.network.socket(STORE) as probe:
            return probe.connect_ex((self.network.addresses[STORE], STORE_PORT)) == 0

    def wait_ready(self, nodes: int | None = None) -> None:
        running = self.nodes[:nodes]
        for node in running:
            node.wait_ready()
        wait_until(lambda: self._known(running), START_S, what="controller that knows all nodes")

    def _known(self, nodes: Sequence[Node]) -> bool:
        self.controller.check()
        try:
            known = {(report.node, report.pid) for report in self.status().nodes}
        except httpx.TransportError:
            return False
        return {(node.id, node.pid) for node in nodes} <= known


def _stop_together(nodes: Sequence[Node]) -> None:
    for node in nodes:
        node.ask_to_stop()
    for node in nodes:
        node.wait_stopped()


def _start_guard(folder: Path, network: Network) -> subprocess.Popen[bytes]:
    descriptors = network.descriptors
    argv = [sys.executable, "-ISE", guard.__file__, str(folder), *map(str, descriptors)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=descriptors, start_new_session=True)


def _machines_own(name: str) -> bool:
    """Variables that must not reach into the bed: another system's settings, and proxies that it cannot reach."""
    return name.startswith(("FS_", "AWS_")) or name.lower().endswith("_proxy")


def _words(pid: int) -> str:
    try:
        return f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode(errors='replace')}"
    except OSError:
        return f"{pid}, gone"
