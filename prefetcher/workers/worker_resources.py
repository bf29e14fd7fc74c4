"""The resources of one worker: memory, code, packages, weights, a process; and the assignment that hands them over.

Bundle, layer and segments are fetched while a process is forked, unless a preforked one is waiting. At the worker's end
memory and segments are released; the process belongs to `worker_process`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from fleetstart.runtime.contract.errors import FleetError, StartFailed, Unavailable
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from fleetstart.runtime.contract.node.channel import ChannelClosed
from fleetstart.runtime.contract.node.devices import host_bytes
from fleetstart.runtime.contract.node.messages import Assign
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.node.reports import ISOLATION_ADVICE

from ..network.served_socket import listening_socket
from ..processes.entered_calls import EnteredCallRing
from ..processes.exit_reasons import out_of_memory
from ..processes.forked_process import ForkedProcess, has_own_network
from ..segments.chunk_requests import ChunkRequests
from ..segments.feeds import Feed
from ..segments.store import Segment
from ..stage_links.stage_links import PipelineMembership
from .node_services import NodeServices
from .sandboxes import Sandbox, sandbox_for
from .worker_folders import WorkerFolders
from .worker_process import WorkerProcess

log = logging.getLogger(__name__)

LISTEN_BACKLOG = 256
LOOPBACK = "127.0.0.1"


class WorkerResources:
    """The resources of one worker. `token` is what callers must present at its `endpoint`."""

    def __init__(self, services: NodeServices, membership: PipelineMembership, process: WorkerProcess) -> None:
        self._services = services
        self._folders = WorkerFolders(services)
        self._membership = membership
        self._process = process
        self.reserved_bytes = 0
        """Reserved part of the node's memory, until the process has ended."""
        self.limit_bytes = 0
        """Limit on its process' memory."""
        self.segments: list[Segment] = []
        """Segments of its weights, then of their adapters."""
        self.cold = False
        """True if some of its weights had to be fetched."""
        self._checkpoints: list[CheckpointId] = []
        self._traffic_before: Counter[str] = Counter()
        self.pooled = False
        """True if its process was preforked."""
        self.prepared = False
        """True if it was prepared for this very version, with its packages imported."""
        self.endpoint = ""
        self.token = secrets.token_urlsafe(24)
        self.secrets: dict[str, str] = {}
        """Secret environment variables; set before the process is assigned."""
        self.assigned_ns = 0
        self._begun = False
        """True if its process has said that it runs."""
        self.entered_calls: EnteredCallRing | None = None
        """Calls that its process has entered; None before it is assigned."""
        self._sandbox: Sandbox | None = None
        self._requests: ChunkRequests | None = None
        """What it may ask for ahead of its turn, once it asks."""
        self._close_ingress: Callable[[], None] = lambda: None

    async def prepare(self, order: WorkerOrder) -> str:
        """Acquires bundle, segments and process; returns the bundle's folder. Errors: FleetError, OSError."""
        spec, services = order.spec, self._services
        self._sandbox = sandbox_for(spec.isolation, services, self._process)
        spare = await services.layer_spares.take(order)  # before its memory is asked for
        if spare is not None:
            self._process.attach(spare)
            self.pooled = self.prepared = True
        services.devices.reserve(order.worker, order.devices)
        self.limit_bytes = host_bytes(spec.memory_bytes, order.devices)
        services.segments.budget.reserve(self.limit_bytes, f"a worker of {spec.name}")
        self.reserved_bytes = self.limit_bytes
        services.segments.budget.memory.shrink()
        self._checkpoints = [] if order.shell else spec.checkpoints
        stages = [self._membership.layers, None]
        self.cold = not all(map(services.segments.is_ready, self._checkpoints, stages))
        self._traffic_before = self._traffic()
        network = spec.network is True
        layer = asyncio.ensure_future(self._folders.acquire_layer(spec, order.worker))
        volumes = asyncio.ensure_future(self._folders.acquire_volumes(order))
        early = self._sandbox is not None and not self._sandbox.takes_folders and (spec.layer or spec.volumes)
        folders = (layer, volumes) if early else ()
        own = network or folders or spec.image or self._gpus(order)
        fresh = spare is None and (own or not services.prefork_pool.has(spec.preloaded_pool))
        fork = asyncio.ensure_future(self._fork(order, folders)) if fresh else None
        weights = asyncio.ensure_future(
            services.segments.acquire_all(
                self._checkpoints, order.worker, self._fetched_layers(order), Feed(order.sources, order.pulls)
            )
        )
        try:
            bundle = services.bundles.ready(spec.bundle) or await services.bundles.get(spec.bundle)
            await layer
            await volumes
            self.segments = await weights
            if not self.prepared:
                self._process.attach(await self._forked(fork, spec))
            if self._sandbox is not None and not self.prepared:
                await self._sandbox.prepare(bundle, self.segments)
        finally:
            for fetch in (layer, volumes):
                fetch.cancel()  # does nothing to one that is done
            await asyncio.gather(layer, volumes, return_exceptions=True)
            await self._release_unused(fork, weights)
        return str(bundle)

    def _fetched_layers(self, order: WorkerOrder) -> tuple[int, int] | None:
        """Layers that are fetched before others; None: all in the order of a multicast, in which others wait for them,
        also by a stage that serves before it has them."""
        return None if order.pulls and order.grow else self._membership.layers

    def stand_by(self, order: WorkerOrder, left_bytes: int) -> None:
        """Gives memory and devices back, except what is left of the process. Its segments stay pinned: they are what it
        is woken from."""
        self.reserved_bytes = min(self.limit_bytes, left_bytes)
        self._services.devices.release(order.worker)

    def wake(self, order: WorkerOrder) -> None:
        """Takes memory and devices again. Errors: Unavailable, with the figures, if others have them now."""
        services = self._services
        if self.reserved_bytes < self.limit_bytes:
            services.devices.reserve(order.worker, order.devices)
            missing_bytes = self.limit_bytes - self.reserved_bytes
            services.segments.budget.reserve(missing_bytes, f"a worker of {order.spec.name} that is woken")
            self.reserved_bytes = self.limit_bytes
            services.segments.budget.memory.shrink()

    async def _fork(self, order: WorkerOrder, folders: Sequence[asyncio.Future[Any]]) -> ForkedProcess:
        """Forks a fresh process; a sandbox once the folders that it must see are there."""
        spec = order.spec
        await asyncio.shield(asyncio.gather(*folders))
        return await self._services.prefork_pool.fork(
            spec.preloaded_pool,
            network=spec.network is True,
            folders=self._folders.inside() if folders else {},
            image=spec.image,
            gpus=self._gpus(order),
        )

    def _gpus(self, order: WorkerOrder) -> list[str]:
        """GPUs that its container must have from its beginning; a worker in namespaces is given its own later."""
        binding = self._services.devices.binding(order.devices) if order.spec.isolation == "container" else None
        return [uuid for uuid in binding.visible.split(",") if uuid] if binding is not None else []

    async def _forked(self, fork: asyncio.Future[ForkedProcess] | None, spec: FunctionSpec) -> ForkedProcess:
        """A waiting process, or the one that is being forked."""
        if fork is None and (process := self._services.prefork_pool.take(spec.preloaded_pool)) is not None:
            self.pooled = True
            return process
        return await (fork or self._services.prefork_pool.fork(spec.preloaded_pool, network=False))

    async def _release_unused(
        self, fork: asyncio.Future[ForkedProcess] | None, weights: asyncio.Future[list[Segment]]
    ) -> None:
        """Takes over what a failed start had begun and no longer needs, so that it is released with the rest."""
        if fork is not None and self._process.forked is None:
            fork.cancel()
            outcome = (await asyncio.gather(fork, return_exceptions=True))[0]
            if isinstance(outcome, ForkedProcess):
                self._process.attach(outcome)
        if not self.segments:
            weights.cancel()
            acquired = (await asyncio.gather(weights, return_exceptions=True))[0]
            if isinstance(acquired, list):
                self.segments = acquired

    async def assign(self, order: WorkerOrder, bundle_dir: str) -> None:
        """Sends the process its assignment. A preforked process that turns out dead is replaced once. Errors:
        StartFailed."""
        try:
            self._send_assignment(order, bundle_dir)
        except ChannelClosed as error:
            if not self.pooled or self._process.forked is None:
                raise StartFailed(f"the worker was gone before it had its function: {error}") from error
            log.warning("a preforked worker was dead, forking another", extra={"worker": order.worker})
            await self._process.terminate()
            prepared, self.pooled, self.prepared = self.prepared, False, False
            spec = order.spec
            fork = self._services.prefork_pool.fork(spec.preloaded_pool, network=spec.network is True, image=spec.image)
            self._process.attach(await fork)
            if prepared and self._sandbox is not None:
                await self._sandbox.prepare(Path(bundle_dir), self.segments)
            try:
                self._send_assignment(order, bundle_dir)
            except ChannelClosed as again:
                raise StartFailed(f"the worker was gone before it had its function: {again}") from again

    def _send_assignment(self, order: WorkerOrder, bundle_dir: str) -> None:
        process, spec = self._process.forked, order.spec
        assert process is not None
        if spec.egress and not has_own_network(process.isolation):
            raise Unavailable(
                f"function {spec.name} has a list of what it may reach, and this node cannot hold a worker to it: its "
                "kernel gives workers no network of their own",
                hint=ISOLATION_ADVICE,
            )
        self._close_ring()
        ring = self.entered_calls = EnteredCallRing()
        if process.group is not None:
            try:
                process.group.limit(self.limit_bytes + (self._sandbox.extra_bytes if self._sandbox is not None else 0))
            except OSError as error:
                raise out_of_memory(self.limit_bytes) from error
        with self._listen() as listener:
            of_segments = [segment.descriptors() for segment in self.segments]
            threads = spec.llm.threads if spec.llm is not None else 0
            binding = self._services.devices.binding(order.devices)
            cores = len(binding.cores) if binding is not None else 0
            message = Assign(
                worker=order.worker,
                version=order.version,
                spec=spec,
                stage=order.stage,
                secret=order.secret,
                link_identity=self._membership.link_identity,
                bundle_dir=bundle_dir,
                layer_dir=self._folders.layer_dir,
                volumes=self._folders.volumes,
                token=self.token,
                threads=threads or cores or self._services.cpus,
                binding=binding,
                secrets=self.secrets,
                slabs=[len(descriptors) - 1 for descriptors in of_segments],
                shell=order.shell,
                user=self._services.prefork_pool.give_user(process, spec.name),
            )
            session = self._folders.open_session(order)
            streams = (ring.descriptor, *((session.descriptor(),) if session is not None else ()))
            memory = chain.from_iterable(of_segments)
            if self._sandbox is not None:
                self._sandbox.send(process, message, listener, streams, memory, self._folders.inside())
            else:
                process.send(message, (listener.fileno(), *streams, *self._membership.descriptors(), *memory))
            if session is not None:
                session.begin()
        self.assigned_ns = time.monotonic_ns()
        self._membership.assigned(process)

    def _listen(self) -> socket.socket:
        """The worker's listening socket, at the node's address; with TLS on loopback, and the node's is before it.
        Errors: OSError."""
        self._close_ingress()
        ingress = self._services.tls_ingress()
        listener = listening_socket(LOOPBACK if ingress is not None else self._services.address, LISTEN_BACKLOG)
        host, port = listener.getsockname()[:2]
        if ingress is not None:
            try:
                (host, port), self._close_ingress = ingress.open(self._services.address, (host, port))
            except OSError:
                listener.close()
                raise
        self.endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return listener

    @property
    def running(self) -> bool:
        """True once its process runs our code: one that waited does."""
        return self.pooled or self._begun

    def on_running(self, started_ns: int) -> None:
        """A process that was forked for this worker counts as assigned once it has begun to run."""
        self._begun = True
        if not self.pooled:
            self.assigned_ns = max(self.assigned_ns, started_ns)

    def prioritize(self, first: int, last: int) -> None:
        """Fetches these chunks first, because the worker waits for them. Untrusted: chunks that its weights do not have
        are ignored, and those that it asked for before. Also a stage may ask for all: it takes over the layers of one
        that was lost. Errors: Unavailable if there is no memory for them, and others use the weights."""
        if not self.segments:
            return
        segment = self.segments[0]
        if self._requests is None:
            self._requests = ChunkRequests(segment.needed(None))
        for begin, end in self._requests.admit(first, last):
            self._services.segments.prioritize(segment, begin, end)

    def feed(self, order: WorkerOrder) -> None:
        """Lets the fetch of its weights have chunks from peers that a changed order names."""
        if self.segments and order.sources:
            self._services.segments.feed(self.segments[0], Feed(order.sources, order.pulls))

    def grow(self) -> None:
        """Fetches the rest of the model in the background, if the order says so."""
        if self.segments:
            self._membership.grow(self._services.segments, self.segments[0])

    def fetched_ns(self, since_ns: int) -> tuple[int, int] | None:
        """(begin, end) of the fetch of its weights and packages, clipped to its own lifetime; None if nothing was
        fetched."""
        if not self.segments or not self.cold:
            return self._folders.fetch_ns
        begun_ns = min(segment.fetch_span_ns[0] for segment in self.segments)
        ends_ns = [segment.fetch_span_ns[1] for segment in self.segments]
        ended_ns = max(ends_ns) if all(ends_ns) else time.monotonic_ns()
        if self._folders.fetch_ns is not None:
            begun_ns, ended_ns = min(begun_ns, self._folders.fetch_ns[0]), max(ended_ns, self._folders.fetch_ns[1])
        return max(begun_ns, since_ns), ended_ns

    @property
    def fetched(self) -> dict[str, int]:
        """Bytes of its weights by source, since the worker was ordered."""
        return dict(self._traffic() - self._traffic_before) if self.cold else {}

    def _traffic(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for checkpoint in self._checkpoints:
            found.update(self._services.segments.traffic(checkpoint))
        return found

    @property
    def segment_error(self) -> FleetError | None:
        return next((segment.error for segment in self.segments if segment.error is not None), None)

    def release(self, worker: WorkerId) -> None:
        """Releases memory and segments. Called once the process has ended."""
        if self._sandbox is not None:
            self._sandbox.close()
        self._close_ring()
        self._close_ingress()
        self.reserved_bytes = 0
        self._services.devices.release(worker)
        self._folders.release(worker)
        for segment in self.segments:
            self._services.segments.release(segment, worker)
        self.segments = []

    def _close_ring(self) -> None:
        if self.entered_calls is not None:
            self.entered_calls.close()
            self.entered_calls = None
