"""A real controller process, a worker app that keeps the worker's side of the contract, and a node driven by hand."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest
import redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.ids import CheckpointId, NodeId, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerState, WorkerStatus
from fleetstart.runtime.contract.node.peers import CopyOrder
from fleetstart.runtime.contract.node.reports import NodeReport, SegmentReport
from fleetstart.runtime.contract.node.speed import Speed
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.timeline import Timeline
from fleetstart.runtime.worker.kept_answers import KeptAnswers
from fleetstart.runtime.worker_io.asgi import App
from tests.controller.worker_app import WorkerApp
from tests.forked_main import ForkedMain
from tests.servers import NO_CERTIFICATES, AppServer, RedisServer, end, listening_socket, spawn, wait_until

BUNDLE = b"a bundle, as far as the controller looks into it"
BUNDLE_ID = hashlib.sha256(BUNDLE).hexdigest()
LEASE_MS = 3000
"""Lease of a node, as long as a daemon's."""


class HandNode:
    """The node's side of the protocol, with the test deciding what becomes of an order.

    `answer(node, order)` is called for each order that is new or changed, in this node's thread; `serve` is the
    answer of a node on which everything goes well.
    """

    def __init__(self, redis_server: RedisServer, name: str = "node-1", memory_bytes: int = 4096 * MIB) -> None:
        self.name = NodeId(name)
        self.epoch = "e1"
        self.memory_bytes = memory_bytes
        self.region = ""
        self.isolations: list[str] = []
        self.speeds: dict[str, Speed] = {}
        self.peer_address = ""
        self.public_key = ""
        self.segments: Callable[[], list[SegmentReport]] = list
        self.answer: Callable[[HandNode, WorkerOrder], None] = HandNode.serve
        self.report: Callable[[NodeReport], bytes] = msgspec.json.encode
        self.orders: list[WorkerOrder] = []
        self.latest: dict[WorkerId, WorkerOrder] = {}
        """Orders as they are in Redis, also those with other sources only."""
        self.copies: dict[CheckpointId, CopyOrder] = {}
        self.apps: dict[WorkerId, WorkerApp] = {}
        self.servers: dict[WorkerId, AppServer] = {}
        self.statuses: dict[WorkerId, WorkerStatus] = {}
        self._server = redis_server
        self.client = self._client = redis_server.client()
        self._seen: dict[WorkerId, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> HandNode:
        self._thread.start()
        return self

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        for server in self.servers.values():
            server.close()
        self._client.close()

    @property
    def closed(self) -> bool:
        return self._stop.is_set()

    def ordered(self, wanted: str = "run") -> list[WorkerOrder]:
        return [order for order in self.orders if order.wanted == wanted]

    def _run(self) -> None:
        pubsub = None
        renewed = 0.0
        while not self._stop.is_set():
            try:
                if pubsub is None:
                    pubsub = self._client.pubsub(ignore_subscribe_messages=True)
                    pubsub.subscribe(keys.events_desired(self.name))
                if time.monotonic() - renewed > 0.3:
                    self._renew()
                    renewed = time.monotonic()
                message = pubsub.get_message(timeout=0.02)
                if message is not None:
                    self._order(msgspec.json.decode(message["data"], type=WorkerOrder))
            except (redis.RedisError, OSError):
                with contextlib.suppress(Exception):
                    if pubsub is not None:
                        pubsub.close()
                pubsub = None
                self._stop.wait(0.02)
        if pubsub is not None:
            pubsub.close()

    def _renew(self) -> None:
        report = NodeReport(
            node=self.name, epoch=self.epoch, address="127.0.0.1", memory_bytes=self.memory_bytes,
            memory_used_bytes=0, cpus=2, speeds=self.speeds, segments=self.segments(), region=self.region,
            isolations=self.isolations, public_key=self.public_key, peer_address=self.peer_address,
            peer_transports=("tcp",) if self.peer_address else (),
        )  # fmt: skip
        self._client.hset(keys.NODES, self.name, "1")
        self._client.set(keys.node(self.name), self.report(report), px=LEASE_MS)
        desired: dict[bytes, bytes] = self._client.hgetall(keys.desired(self.name))  # type: ignore[assignment]
        found = [msgspec.json.decode(raw, type=WorkerOrder) for raw in desired.values()]
        self.latest = {order.worker: order for order in found}
        copies: dict[bytes, bytes] = self._client.hgetall(keys.copies(self.name))  # type: ignore[assignment]
        self.copies = {
            copy.checkpoint: copy for raw in copies.values() for copy in [msgspec.json.decode(raw, type=CopyOrder)]
        }
        for order in found:
            self._order(order)
        for worker in list(self.statuses):
            if worker.encode() not in desired and worker in self._seen:
                self._client.hdel(keys.observed(self.name), worker)
                self.statuses.pop(worker)
                self.end_server(worker)
            else:
                self.publish(self.statuses[worker], quietly=True)

    def _order(self, order: WorkerOrder) -> None:
        if self._seen.get(order.worker) == order.wanted:
            return
        self._seen[order.worker] = order.wanted
        self.orders.append(order)
        self.answer(self, order)

    # ── answers ────────────────────────────────────────────────────────────────────────────────────

    def serve(self, order: WorkerOrder) -> None:
        if order.wanted == "drain":
            self.say(order, "gone")
        else:
            self.say(order, "starting")
            self.ready(order)

    def ready(self, order: WorkerOrder, *, start: str = "warm", timeline: Timeline | None = None) -> WorkerApp:
        app = self.apps[order.worker] = WorkerApp("token-" + order.worker, order.spec.concurrency)
        served: Any = app.while_it_lives(KeptAnswers(cast(App, app), token=app.token))
        # As a worker's own server: one that closed an idle connection would race with a call on it, which is then lost.
        server = self.servers[order.worker] = AppServer(served, log_level="critical", timeout_keep_alive=3600).start()
        self.say(order, "ready", endpoint=f"127.0.0.1:{server.port}", token=app.token, start=start,
                 timeline=timeline or Timeline())  # fmt: skip
        return app

    def say(self, order: WorkerOrder, state: WorkerState, **fields: Any) -> None:
        status = WorkerStatus(
            worker=order.worker, node=self.name, function=order.spec.name, version=order.version, state=state,
            changed_unix_ns=time.time_ns(), **fields,
        )  # fmt: skip
        self.statuses[order.worker] = status
        self.publish(status)

    def publish(self, status: WorkerStatus, *, quietly: bool = False) -> None:
        raw = msgspec.json.encode(status)
        self._client.hset(keys.observed(self.name), status.worker, raw)
        if not quietly:
            self._client.publish(keys.EVENTS_OBSERVED, raw)

    def fail(self, order: WorkerOrder, code: str, message: str) -> None:
        self.end_server(order.worker)
        self.say(order, "failed", error=ErrorInfo(code=code, message=message))

    def end_server(self, worker: WorkerId) -> None:
        server = self.servers.pop(worker, None)
        if server is not None:
            server.close()


class ControllerProcess:
    """`python -m fleetstart.controller` on a socket that outlives it, so that it can be killed and started again.

    It is open unless `env` says FS_OPEN="0": most tests are not about access. It is forked, unless a subclass has a
    `command` to run it by."""

    command: Sequence[str] = ()

    def __init__(self, home: Path, redis_url: str, **env: str) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self.socket = listening_socket()
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self._env = {
            "FS_HOME": str(home), "FS_REDIS_URL": redis_url, "FS_STORE": str(home / "store"), "FS_URL": self.url,
            "FS_LISTEN_FD": str(self.socket.fileno()), "FS_PARENT_DEATH": "1", "FS_OPEN": "1", **env,
        }  # fmt: skip
        self.process: subprocess.Popen[bytes] | ForkedMain | None = None
        self.http = httpx.Client(base_url=self.url, timeout=30, verify=NO_CERTIFICATES)

    def start(self) -> ControllerProcess:
        self.spawn()
        wait_until(self._is_up, 20, what="controller")
        return self

    def spawn(self) -> None:
        env, log = {**os.environ, **self._env}, self.home / "controller.log"
        if not self.command:
            self.process = ForkedMain(
                "fleetstart.controller.__main__:main", env=env, out=log, err=log, listen=self.socket
            )
            return
        with log.open("ab") as file:
            self.process = spawn(self.command, env=env, stdout=file, stderr=file, pass_fds=[self.socket.fileno()])

    def _is_up(self) -> bool:
        return self.answers("/api/v1/status") and bool(self.http.get("/api/v1/status").json()["redis"] == "ok")

    def answers(self, path: str) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        try:
            return self.http.get(path, timeout=2).is_success
        except httpx.HTTPError:
            return False

    def log(self) -> str:
        return (self.home / "controller.log").read_text()

    def kill(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.http.close()
        if self.process is not None:
            end(self.process, grace_s=20)
        self.socket.close()

    def deploy(self, name: str, **fields: Any) -> dict[str, Any]:
        self.http.put(f"/api/v1/objects/bundles/{BUNDLE_ID}", content=BUNDLE).raise_for_status()
        spec = {"name": name, "bundle": BUNDLE_ID, "entry": "handler:run", "concurrency": 1, **fields}
        answer = self.http.post("/api/v1/functions", json=spec)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def rows(self, function: str) -> list[dict[str, Any]]:
        answer = self.http.get("/api/v1/invocations", params={"function": function, "limit": 1000})
        return list(answer.json())


@pytest.fixture
def node(redis_server: RedisServer) -> Iterator[HandNode]:
    node = HandNode(redis_server).start()
    try:
        yield node
    finally:
        node.close()


@pytest.fixture
def controller(redis_url: str, tmp_path: Path) -> Iterator[ControllerProcess]:
    process = ControllerProcess(tmp_path / "home", redis_url, FS_MAX_BODY=str(4 * MIB))
    try:
        yield process.start()
    finally:
        process.close()
