"""A store with bundles and checkpoints, an S3 server over a folder, and a node daemon under test."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import redis
import xxhash

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import LogLine, PhaseRow
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import (
    BundleId,
    CheckpointId,
    FunctionName,
    NodeId,
    Version,
    WorkerId,
    new_worker_id,
)
from fleetstart.runtime.contract.node.devices import DeviceShare
from fleetstart.runtime.contract.node.orders import FINAL, WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.node.reports import NodeReport
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.weights.manifest import Manifest, Part, TensorEntry, checkpoint_id, manifest_bytes
from fleetstart.runtime.contract.worker_headers import REQUEST_HEADER, TOKEN_HEADER
from tests.servers import RedisServer, free_port, plain_environment, spawn, wait_until

CHUNK_BYTES = 64 * 1024
HELLO = "def hello(name: str = 'world') -> str:\n    return f'hello {name}'\n"


class Store:
    """A folder laid out like a bucket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, key: str, data: bytes) -> None:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def path(self, key: str) -> Path:
        return self.folder / key

    def put_bundle(self, files: dict[str, str]) -> BundleId:
        data = tar_of({name: text.encode() for name, text in files.items()})
        bundle = BundleId(hashlib.sha256(data).hexdigest())
        self.put(f"bundles/{bundle}", data)
        return bundle

    def put_checkpoint(self, *parts: bytes, chunk_bytes: int = CHUNK_BYTES, digests: bool = False) -> CheckpointId:
        """Parts of any bytes, each one U8 tensor `t0`, `t1`, ..."""
        manifest, objects = checkpoint_of(parts, chunk_bytes=chunk_bytes, digests=digests)
        data = manifest_bytes(manifest)
        checkpoint = checkpoint_id(data)
        self.put(f"checkpoints/{checkpoint}/manifest.json", data)
        for name, content in objects.items():
            self.put(f"checkpoints/{checkpoint}/{name}", content)
        return checkpoint


def tar_of(files: dict[str, bytes], members: Iterable[tarfile.TarInfo] = ()) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for member in members:
            tar.addfile(member)
    return out.getvalue()


def checkpoint_of(
    parts: Iterable[bytes], *, chunk_bytes: int, digests: bool = False
) -> tuple[Manifest, dict[str, bytes]]:
    entries: list[Part] = []
    found: list[str] = []
    chunks: list[int] = []
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, bytes] = {}
    offset = 0
    for number, data in enumerate(parts):
        head = msgspec.json.encode(
            {f"t{number}": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
        )
        head = len(head).to_bytes(8, "little") + head
        name = f"part-{number:05}.safetensors"
        objects[name] = head + data
        entries.append(Part(object=name, header_bytes=len(head), data_bytes=len(data), segment_offset=offset))
        tensors[f"t{number}"] = TensorEntry(offset, len(data), "U8", (len(data),), number)
        pieces = [data[begin : begin + chunk_bytes] for begin in range(0, len(data), chunk_bytes)]
        chunks.extend(xxhash.xxh3_64_intdigest(piece) for piece in pieces)
        found.extend(hashlib.sha256(piece).hexdigest() for piece in pieces if digests)
        offset += len(pieces) * chunk_bytes
    manifest = Manifest(
        chunk_bytes=chunk_bytes, total_bytes=offset, parts=entries, chunks=chunks, digests=found, tensors=tensors
    )
    return manifest, objects


class S3Server:
    """localbucket as a process of its own, over a folder whose subfolders are buckets."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        binary = Path(sys.executable).parent / "localbucket"
        with (self.root.parent / "s3.log").open("ab") as log:
            self.process = spawn(
                [sys.executable, binary, "--port", str(self.port), self.root], stdout=log, stderr=subprocess.STDOUT
            )
        wait_until(self._answers, 20, what="S3 server")

    def log(self) -> str:
        return (self.root.parent / "s3.log").read_text()

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None
        try:
            urllib.request.urlopen(self.url, timeout=1).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Node:
    """A daemon as a real process; tests write its orders."""

    def __init__(self, server: RedisServer, store: str, home: Path, **env: str) -> None:
        self.server = server
        self.store = store
        self.home = home
        self.id = NodeId("node-1")
        self.env = env
        self.through: list[str] = []
        """Command that the daemon is run by, if any."""
        self.process: subprocess.Popen[bytes] | None = None
        self.client: redis.Redis = server.client()
        self.started = 0

    # ── its life ───────────────────────────────────────────────────────────────────────────────────

    def start(self, *, wait: bool = True) -> Node:
        self.started += 1
        self.home.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.through, sys.executable, "-m", "fleetstart.prefetcher"],
                env=self.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if wait:
            wait_until(lambda: self._alive() and self.report() is not None, 30, what="lease of the node")
            wait_until(lambda: self._alive() and self.warm(), 60, what="warm fork server")
        return self

    def environment(self) -> dict[str, str]:
        return {
            **plain_environment(),
            "FS_HOME": str(self.home),
            "FS_REDIS_URL": self.server.url,
            "FS_STORE": self.store,
            "FS_NODE": self.id,
            "FS_PROFILES": "python",
            "FS_PARENT_DEATH": "1",
            "FS_POOL_MEMORY": "0",
            "FS_EGRESS_ALLOW": "127.0.0.2",  # where the peers of its tests listen
            **self.env,
        }

    def _alive(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        return True

    def warm(self) -> bool:
        report = self.report()
        assert self.process is not None
        return report is not None and report.pid == self.process.pid and bool(report.profiles)

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(20)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()
        self.client.close()

    @property
    def log_path(self) -> Path:
        return self.home / "daemon.log"

    def log(self) -> str:
        return self.log_path.read_text()

    def descendants(self) -> list[psutil.Process]:
        assert self.process is not None
        return list(psutil.Process(self.process.pid).children(recursive=True))

    # ── orders and statuses ────────────────────────────────────────────────────────────────────────

    @property
    def epoch(self) -> str:
        return self.lease().epoch

    def lease(self) -> NodeReport:
        report = self.report()
        assert report is not None
        return report

    def report(self) -> NodeReport | None:
        data: Any = self.client.get(keys.node(self.id))
        return msgspec.json.decode(data, type=NodeReport) if data else None

    def order(
        self,
        spec: FunctionSpec,
        *,
        epoch: str = "",
        version: int = 1,
        publish: bool = True,
        devices: tuple[DeviceShare, ...] = (),
    ) -> WorkerId:
        order = WorkerOrder(
            worker=new_worker_id(),
            node=self.id,
            epoch=epoch or self.epoch,
            version=Version(version),
            spec=spec,
            ordered_unix_ns=time.time_ns(),
            devices=devices,
        )
        self.write(order, publish=publish)
        return order.worker

    def write(self, order: WorkerOrder, *, publish: bool = True) -> None:
        data = msgspec.json.encode(order)
        self.client.hset(keys.desired(self.id), order.worker, data)
        if publish:
            self.client.publish(keys.events_desired(self.id), data)

    def ordered(self, worker: WorkerId) -> WorkerOrder:
        data: Any = self.client.hget(keys.desired(self.id), worker)
        return msgspec.json.decode(data, type=WorkerOrder)

    def drain(self, worker: WorkerId) -> None:
        self.write(msgspec.structs.replace(self.ordered(worker), wanted="drain"))

    def take_back(self, worker: WorkerId) -> None:
        self.client.hdel(keys.desired(self.id), worker)

    def status(self, worker: WorkerId) -> WorkerStatus | None:
        data: Any = self.client.hget(keys.observed(self.id), worker)
        return msgspec.json.decode(data, type=WorkerStatus) if data else None

    def wait_for(self, worker: WorkerId, *states: str, deadline_s: float = 30) -> WorkerStatus:
        def reached() -> WorkerStatus | None:
            status = self.status(worker)
            if status is not None and status.state in FINAL and status.state not in states:
                raise AssertionError(f"{worker} is {status.state}: {status.error}\n{self.log()}")
            return status if status is not None and status.state in states else None

        found = wait_until(reached, deadline_s, what=f"{worker} {states}\n{self.log()}")
        assert found is not None
        return found

    # ── what it left ───────────────────────────────────────────────────────────────────────────────

    def log_lines(self, function: str) -> list[LogLine]:
        rows: Any = self.client.xrange(keys.logs(FunctionName(function)))
        return [msgspec.json.decode(fields[b"line"], type=LogLine) for _, fields in rows]

    def ledger(self) -> list[PhaseRow]:
        rows: Any = self.client.xrange(keys.LEDGER)
        return [msgspec.json.decode(fields[b"row"], type=PhaseRow) for _, fields in rows]


def call(
    status: WorkerStatus, body: bytes = b"{}", *, token: str | None = None, request: str = ""
) -> tuple[int, bytes]:
    """POST to the worker's endpoint, as a gateway does."""
    headers = {TOKEN_HEADER: status.token if token is None else token, "content-type": "application/json"}
    if request:
        headers[REQUEST_HEADER] = request
    sent = urllib.request.Request(f"http://{status.endpoint}/", data=body, headers=headers)
    try:
        with urllib.request.urlopen(sent, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def spec_of(bundle: BundleId, **fields: Any) -> FunctionSpec:
    values: dict[str, Any] = {
        "name": FunctionName("hello"),
        "bundle": bundle,
        "entry": "handler:hello",
        "memory_bytes": 256 * MIB,
        **fields,
    }
    return FunctionSpec(**values)


def groups_of(epoch: str) -> list[str]:
    return [
        os.path.join(folder, name)
        for folder, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if name == f"fleetstart-{epoch}"
    ]
