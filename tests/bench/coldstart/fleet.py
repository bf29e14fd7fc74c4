"""Test bed of the cold start benchmark: makes hosts cold, streams calls, reads which workers ran and what a link gives.

All hosts are one machine, so all stamps are of one monotonic clock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.node.orders import FINAL, WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.node.reports import NodeReport
from fleetstart.runtime.contract.object_keys import checkpoint_key
from tests.bench.coldstart.models import Model
from tests.bench.harness.samples import ROOT
from tests.e2e.systems import FS
from tests.servers import wait_until
from tests.testbed import Testbed
from tests.testbed.bed import STORE_PORT
from tests.testbed.parts import Node

PROMPT = "Write a short story about a dog."
CALL_S = 280.0
RATE_BYTES = 32 << 20
"""A second and a half at 200 Mbit/s: the first burst of a link's bucket is a hundredth of it."""
NODE = {"FS_PROFILES": "torch", "FS_POOL_MEMORY": "320MiB"}
"""Memory for a stage made ahead, as a node in service has it."""
QUICK_NODE = NODE | {"FS_POOL_MEMORY": "96MiB"}


@dataclass(slots=True)
class Generated:
    """One streamed call."""

    sent_ns: int
    request_id: str = ""
    start: str = ""
    pieces_ns: list[int] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    """As the answer itself counts them: several may come in one piece."""

    @property
    def ttft_s(self) -> float:
        return (self.pieces_ns[0] - self.sent_ns) / 1e9

    @property
    def total_s(self) -> float:
        return (self.pieces_ns[-1] - self.sent_ns) / 1e9

    @property
    def seconds(self) -> list[float]:
        """When each piece came, from the call on."""
        return [(piece - self.sent_ns) / 1e9 for piece in self.pieces_ns]


@dataclass(frozen=True, slots=True)
class Worker:
    order: WorkerOrder
    status: WorkerStatus

    @property
    def index(self) -> int:
        return self.order.stage.index if self.order.stage is not None else 0

    def about(self, sent_ns: int) -> dict[str, Any]:
        """The worker's layers and its start, in seconds from the call on: [begun, ended] of each phase."""
        stage = self.order.stage
        phases: dict[str, Any] = {
            phase.name: [(phase.started_ns - sent_ns) / 1e9, (phase.ended_ns - sent_ns) / 1e9]
            for phase in self.status.timeline.phases
        }
        return {"layers": [stage.first, stage.end] if stage is not None else "all", **phases}


class Fleet:
    def __init__(self, bed: Testbed) -> None:
        self.bed = bed
        self._plain = bed.controller.argv

    def deploy(self, model: Model) -> None:
        """Deploys with more time than `bed.fs` has: a gigabyte goes up through a small store."""
        env = {**os.environ, "FS_URL": self.bed.url, "FS_HOME": str(self.bed.folder / "user")}
        argv = [*FS, "deploy", str(model.handler), "--no-probe", *model.options]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=CALL_S, cwd=self.bed.folder)
        if done.returncode:
            raise RuntimeError(f"fs deploy ended with {done.returncode}: {done.stderr[-2000:]}")

    def parts(self, model: Model) -> list[Path]:
        """The checkpoint's objects, as files."""
        weights = self.bed.info(model.name).spec.weights
        assert weights is not None
        return sorted((self.bed.bucket / checkpoint_key(weights, "")).glob("*.safetensors"))

    def size_bytes(self, model: Model) -> int:
        """Bytes that a whole worker fetches."""
        return sum(path.stat().st_size for path in self.parts(model))

    def chill(self, nodes: int, *, change: str = "") -> None:
        """The next call is cold, and only so many hosts are there. `change`: of `controller`."""
        controller = self.bed.controller
        controller.argv = (sys.executable, "-m", "tests.bench.coldstart.controller", change) if change else self._plain
        controller.env["PYTHONPATH"] = str(ROOT)
        self.bed.chill(nodes)
        wait_until(lambda: self._memory_made(nodes), CALL_S, what="memory made ahead")
        wait_until(lambda: all(map(_spare_waits, self.bed.nodes[:nodes])), CALL_S, what="spare workers")

    def warm_up(self, serving: Sequence[str]) -> None:
        """Starts the hosts that do not run, and waits until all are ready to take workers."""
        for node in self.bed.nodes:
            if node.id not in serving:
                node.start()
        self.bed.wait_ready()
        others = [index for index, node in enumerate(self.bed.nodes) if node.id not in serving]
        wait_until(lambda: all(_memory_waits(self.bed.report(index)) for index in others), CALL_S, what="memory")
        wait_until(lambda: all(_spare_waits(self.bed.nodes[index]) for index in others), CALL_S, what="spare workers")

    def served_by(self, call: Generated) -> str:
        """The node whose worker took a call; empty if that is not known."""
        answer = self.bed.http.get(f"/api/v1/invocations/{call.request_id}")
        return str(answer.json().get("node", "")) if answer.status_code == 200 else ""

    def fetched(self, model: Model) -> dict[str, int]:
        """Bytes that the live workers' starts took from each source."""
        found: dict[str, int] = {}
        for worker in self.workers(model):
            for source, size_bytes in worker.status.fetched.items():
                found[source] = found.get(source, 0) + size_bytes
        return found

    def _memory_made(self, nodes: int) -> bool:
        reports = [self.bed.report(node) for node in range(nodes)]
        return all(map(_memory_waits, reports))

    def ask(self, model: Model, *, tokens: int, prompt: str = PROMPT) -> Generated:
        """Greedy, and to the last token, whatever it is."""
        body = {
            "model": model.name,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        found = Generated(time.monotonic_ns())
        path = f"/fn/{model.name}/v1/chat/completions"
        with self.bed.http.stream("POST", path, json=body, timeout=CALL_S) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{model.name}: {answer.status_code} {answer.read()[:500]!r}")
            found.request_id, found.start = answer.headers["x-request-id"], answer.headers["fs-start"]
            for line in answer.iter_lines():
                event = _event(line)
                text = _text(event)
                if text:
                    found.pieces_ns.append(time.monotonic_ns())
                    found.text += text
                found.tokens = (event.get("usage") or {}).get("completion_tokens", found.tokens)
        if not found.pieces_ns:
            raise RuntimeError(f"{model.name}: no text came")
        return found

    def workers(self, model: Model) -> list[Worker]:
        """The live workers of the model, by stage."""
        orders: dict[str, WorkerOrder] = {}
        statuses: dict[str, WorkerStatus] = {}
        with self.bed.redis() as client:
            for node in self.bed.nodes:
                desired: Any = client.hvals(keys.desired(node.id))
                observed: Any = client.hvals(keys.observed(node.id))
                orders |= {order.worker: order for order in map(_order, desired)}
                statuses |= {status.worker: status for status in map(_status, observed)}
        found = [
            Worker(order, statuses[worker])
            for worker, order in orders.items()
            if order.spec.name == model.name and worker in statuses and statuses[worker].state not in FINAL
        ]
        return sorted(found, key=lambda one: one.index)

    def link_bytes_per_s(self, model: Model) -> float:
        """Rate of one TCP stream from the store to the first host: the ceiling of any fetch."""
        object_key = self.parts(model)[0].relative_to(self.bed.bucket.parent)
        with self.bed.network.socket(self.bed.host(0)) as sock:
            sock.settimeout(CALL_S)
            sock.connect((self.bed.network.addresses["store"], STORE_PORT))
            sock.sendall(f"GET /{object_key} HTTP/1.0\r\n\r\n".encode())
            sock.recv(1 << 16)
            began_s, received = time.monotonic(), 0
            while received < RATE_BYTES and (data := sock.recv(1 << 20)):
                received += len(data)
            return received / (time.monotonic() - began_s)

    def entered(self, argv: Sequence[str]) -> list[str]:
        """The command as run on the first host."""
        return self.bed.network.entered(self.bed.host(0), argv)


def _memory_waits(report: NodeReport | None) -> bool:
    return report is not None and report.weights_memory.free_bytes > 0


def _spare_waits(node: Node) -> bool:
    """The daemon that runs now has a spare worker: what the log says after the last shutdown."""
    return "worker preforked" in node.log().rpartition("prefetcher.daemon: shutting down")[2]


def _event(line: str) -> dict[str, Any]:
    """Empty for what carries none. RuntimeError if it tells of one."""
    event: dict[str, Any] = json.loads(line[6:]) if line.startswith("data: {") else {}
    if "error" in event:
        raise RuntimeError(line[:500])
    return event


def _text(event: dict[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    return str((choices[0].get("delta") or {}).get("content") or "")


def _order(row: bytes) -> WorkerOrder:
    return msgspec.json.decode(row, type=WorkerOrder)


def _status(row: bytes) -> WorkerStatus:
    return msgspec.json.decode(row, type=WorkerStatus)
