"""Simulated workers, and the HTTP session by which gateways reach them.

A worker's process is simulated; its record and its meter, which make the bill, are the product's. What it has run is
noted in the history, which knows more than any log.
"""

from __future__ import annotations

import asyncio
import time
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from multidict import CIMultiDict

from fleetstart.prefetcher.processes.consumption import Consumption
from fleetstart.prefetcher.workers.worker_record import WorkerRecord
from fleetstart.runtime.contract.errors import ErrorInfo, FleetError, StartFailed
from fleetstart.runtime.contract.node.messages import Usage
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerState, WorkerStatus
from fleetstart.runtime.contract.timeline import Timeline
from fleetstart.runtime.contract.worker_headers import BUSY_HEADER, DRAINING_HEADER, REQUEST_HEADER, STREAM_HEADER
from tests.simulation.loop import SimulatedLoop
from tests.simulation.network import Network
from tests.simulation.processes import CURRENT, Process


@dataclass(slots=True)
class Run:
    """One execution of a handler."""

    function: str
    version: int
    request: str
    body: bytes
    worker: str
    began_ns: int
    ended_ns: int = 0


@dataclass(slots=True)
class Life:
    """A worker's life, as it was."""

    order: WorkerOrder
    began_ns: int
    ready_ns: int = 0
    ended_ns: int = 0
    killed: bool = False
    """True if its node was killed, and its last rows with it."""


@dataclass(slots=True)
class History:
    """What workers have done."""

    runs: list[Run] = field(default_factory=list)
    lives: dict[str, Life] = field(default_factory=dict)
    workers: dict[str, SimulatedWorker] = field(default_factory=dict)
    """The living ones, by endpoint."""


class SimulatedWorker:
    """A worker of a node: it starts after a while or fails, serves calls, drains, and is killed."""

    def __init__(self, order: WorkerOrder, node: Any) -> None:
        self.order = order
        self.state: WorkerState = "starting"
        self.task: asyncio.Task[None] | None = None
        self.record = WorkerRecord(order, node.services, Consumption)
        self.resources = self
        self.reserved_bytes = order.spec.memory_bytes
        self._node = node
        self._world = node.world
        self._events: asyncio.Queue[str] = asyncio.Queue()
        self._calls: dict[asyncio.Task[None], None] = {}  # a set's order would come from addresses
        self._requests: dict[asyncio.Future[Any], None] = {}
        self._kept: dict[str, list[asyncio.Future[Any]] | Response] = {}
        """Answers of keyed calls, or those who wait for them, by the id of the call."""
        self._begun = 0
        self._busy_ns = 0
        self._busy_since_ns = 0
        self.endpoint = f"{order.worker}.sim:80"
        self.process: Process = node.process

    def start(self) -> asyncio.Task[None]:
        self._publish("starting")
        self._world.history.lives[self.order.worker] = Life(self.order, time.monotonic_ns())
        self.task = asyncio.create_task(self._run())
        return self.task

    def update(self, order: WorkerOrder) -> None:
        """Pipelines are not simulated."""

    def drain(self, grace_s: float | None = None) -> None:
        if self.state == "starting":
            self.kill()
        elif self.state == "ready":
            self._publish("draining")
            self._events.put_nowait("drain")

    def kill(self) -> None:
        self._events.put_nowait("kill")

    def fail(self) -> None:
        """The handler's process dies by itself."""
        self._events.put_nowait("fail")

    def reject(self, error: FleetError) -> None:
        self.kill()

    async def _run(self) -> None:
        chance, error, weights = self._world.chance, None, self.order.spec.weights
        if weights is not None:
            self._node.weights.pin(weights, self.order.worker)
        try:
            async with asyncio.timeout(chance.uniform(0.02, 0.8)):
                if await self._events.get() == "fail":
                    error = StartFailed("its process died while it started").info()
        except TimeoutError:
            if chance.random() < self._world.plan.failing_starts and self._world.faulty:
                error = StartFailed("its handler raised while it was loaded").info()
            else:
                error = await self._serve()
        if weights is not None:
            self._node.weights.unpin(weights, self.order.worker)
        self._end(error)

    async def _serve(self) -> ErrorInfo | None:
        now_ns = time.monotonic_ns()
        self._world.history.lives[self.order.worker].ready_ns = now_ns
        self.record.started(now_ns, None, Timeline())
        self._world.history.workers[self.endpoint] = self
        self._publish("ready")
        self.record.ready(now_ns)
        until_s: float | None = None
        while True:
            try:
                async with asyncio.timeout(until_s):
                    event = await self._events.get()
            except TimeoutError:
                return None
            if event == "kill":
                return None
            if event == "fail":
                return ErrorInfo(code="worker_lost", message="its process was killed by signal 9")
            if event == "drain":
                until_s = self.order.spec.timeout_s
            if self.state == "draining" and not self._calls:
                return None

    def _end(self, error: ErrorInfo | None) -> None:
        self._world.history.workers.pop(self.endpoint, None)
        life = self._world.history.lives[self.order.worker]
        life.ended_ns = time.monotonic_ns()
        drained = self.state == "draining" and not self._calls
        for call in self._calls:
            call.cancel()
        for request in list(self._requests):
            self._world.answer(self.process, request, aiohttp.ServerDisconnectedError())
        self._publish("failed" if error is not None else "gone", error, drained=drained)
        self.record.ended((life.began_ns, life.ended_ns), failed=error is not None)

    # ── calls ──────────────────────────────────────────────────────────────────────────────────────

    def accept(self, request: asyncio.Future[Any], headers: dict[str, str], body: bytes) -> None:
        """A request has arrived."""
        kept = self._kept.get(headers[REQUEST_HEADER])
        if headers.get(STREAM_HEADER) == "attach":
            self._attach(request, kept)
        elif self.state != "ready":
            self._world.answer(self.process, request, Response(503, {DRAINING_HEADER: "1"}, b""))
        elif len(self._calls) >= self.order.spec.concurrency:
            self._world.answer(self.process, request, Response(503, {BUSY_HEADER: "1"}, b""))
        else:
            self._requests[request] = None
            if STREAM_HEADER in headers:
                self._kept[headers[REQUEST_HEADER]] = [request]
            call = asyncio.create_task(self._call(request, headers, body))
            self._calls[call] = None
            call.add_done_callback(self._called)

    def _attach(self, request: asyncio.Future[Any], kept: list[asyncio.Future[Any]] | Response | None) -> None:
        """Gives the answer of a call that another gateway has sent."""
        if kept is None:
            self._world.answer(self.process, request, Response(409, {STREAM_HEADER: "unknown"}, b""))
        elif isinstance(kept, Response):
            self._world.answer(self.process, request, kept)
        else:
            self._requests[request] = None
            kept.append(request)

    async def _call(self, request: asyncio.Future[Any], headers: dict[str, str], body: bytes) -> None:
        if not self._busy_since_ns:
            self._busy_since_ns = time.monotonic_ns()
        order, runs = self.order, self._world.history.runs
        run = Run(order.spec.name, order.version, headers[REQUEST_HEADER], body, order.worker, time.monotonic_ns())
        runs.append(run)
        number = len(runs)
        self._begun += 1
        await asyncio.sleep(self._world.run_s())
        run.ended_ns = time.monotonic_ns()
        answer = Response(200, {}, b"%d" % number)
        kept = self._kept.get(headers[REQUEST_HEADER])
        for reader in kept if isinstance(kept, list) else [request]:
            self._requests.pop(reader, None)
            self._world.answer(self.process, reader, answer)
        if kept is not None:
            self._kept[headers[REQUEST_HEADER]] = answer

    def _called(self, call: asyncio.Task[None]) -> None:
        self._calls.pop(call, None)
        if not self._calls and self._busy_since_ns:
            self._busy_ns += time.monotonic_ns() - self._busy_since_ns
            self._busy_since_ns = 0
            self.record.on_usage(Usage(calls=self._begun, running=0, busy_ns=self._busy_ns))
        if self.state == "draining":
            self._events.put_nowait("idle")

    def _publish(self, state: WorkerState, error: ErrorInfo | None = None, *, drained: bool = False) -> None:
        self.state = state
        order, called = self.order, state in ("ready", "draining")
        self._node.statuses.publish(
            WorkerStatus(
                worker=order.worker,
                node=order.node,
                function=order.spec.name,
                version=order.version,
                state=state,
                endpoint=self.endpoint if called else "",
                token="t" if called else "",
                error=error,
                timeline=self.record.timeline,
                changed_unix_ns=time.time_ns(),
                served=self.record.was_ready,
                drained=drained,
            )
        )


class Response:
    """A worker's answer, as aiohttp has it."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers: CIMultiDict[str] = CIMultiDict({"Content-Length": str(len(body)), **headers})
        self.raw_headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        self._body = body

    async def read(self) -> bytes:
        return self._body

    def release(self) -> None:
        """There is no connection."""


class WorkerSession:
    """What a gateway takes for its `aiohttp.ClientSession`."""

    def __init__(self, world: Any, process: Process) -> None:
        self._world = world
        self._loop: SimulatedLoop = world.loop
        self._network: Network = world.network
        self._process = process

    async def request(
        self, method: str, url: Any, *, headers: list[tuple[str, str]], data: Any, allow_redirects: bool
    ) -> Response:
        worker = self._world.history.workers.get(f"{url.host}:80")
        delay_s = self._network.between(self._process, worker.process) if worker is not None else None
        if worker is None or delay_s is None or not worker.process.alive:
            await asyncio.sleep(self._world.chance.uniform(0.001, 0.3))
            raise aiohttp.ConnectionTimeoutError("the worker's host does not answer")
        answered: asyncio.Future[Response] = self._loop.create_future()
        self._world.waiting[answered] = (self._process, worker.process)
        self._loop.call_later(
            delay_s, worker.accept, answered, dict(headers), data or b"", context=in_process(worker.process)
        )
        try:
            return await answered
        finally:
            self._world.waiting.pop(answered, None)

    async def close(self) -> None:
        """There is nothing to close."""


def in_process(process: Process) -> Context:
    """A context in which a callback belongs to the process."""
    context = copy_context()
    context.run(CURRENT.set, process)
    return context
