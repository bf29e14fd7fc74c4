"""One ordered worker's life, told straight down: prepare, assign, ready, serve, end.

Each worker is one task. Its process, the reconciler and the clock speak to it through one queue; being
ordered away cancels it, at whatever point it is. Whatever happens, it ends in one final status, with its
process dead, its group removed, its segment unpinned and its time in the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from fleetstart.prefetcher.body import Body
from fleetstart.prefetcher.bundles import Bundles
from fleetstart.prefetcher.endings import out_of_memory
from fleetstart.prefetcher.forkserver import ChannelGone, Exit, Process
from fleetstart.prefetcher.links import Role
from fleetstart.prefetcher.logs import Logs, Stream
from fleetstart.prefetcher.meter import Rows, WorkerMeter
from fleetstart.prefetcher.relay import Relays
from fleetstart.prefetcher.segments import Segment, Segments
from fleetstart.prefetcher.spares import Spares
from fleetstart.prefetcher.speeds import Speeds
from fleetstart.runtime.contract.channel import ChannelClosed
from fleetstart.runtime.contract.errors import ErrorInfo, FleetError, StartFailed, error_from
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.messages import (
    FINAL,
    Assign,
    Drain,
    Drained,
    Pooled,
    Ready,
    StartError,
    Usage,
    Want,
    Whole,
    WorkerOrder,
    WorkerState,
    WorkerStatus,
)
from fleetstart.runtime.contract.timeline import Timeline, machine_origin_ns

log = logging.getLogger(__name__)

LISTEN_BACKLOG = 256
DRAIN_MARGIN_S = 2.0
"""Beyond a drain's grace, for the worker to say so and go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a node offers its workers."""

    node: NodeId
    address: str
    cpus: int
    bundles: Bundles
    segments: Segments
    spares: Spares
    logs: Logs
    rows: Rows
    speeds: Speeds
    relays: Relays | None
    """None where the store is none that nodes share over a network."""
    publish: Callable[[WorkerStatus], None]


class Worker:
    def __init__(self, order: WorkerOrder, host: Host) -> None:
        self.order = order
        self.seen_ns = time.monotonic_ns()
        self.state: WorkerState = "starting"
        self.reserved_bytes = 0
        """Of the node's memory, until its process has ended."""
        self.body = Body(order.worker, host.spares, lambda line: self._log("stdout", line))
        self._host = host
        self._spec = order.spec
        self._segments: list[Segment] = []
        """Of its weights, then of their adapter."""
        self._start_cold = False
        self._pooled = False
        self._endpoint = ""
        self._token = secrets.token_urlsafe(24)
        self._assigned_ns = 0
        self._drain_until_s: float | None = None
        self._begun = False
        self._ending = False
        self.task: asyncio.Task[None] | None = None
        self._timeline = Timeline()
        self._role = Role(
            order,
            host.address,
            host.relays,
            note=lambda text: self._log("system", text),
            changed=lambda: self._publish(self.state),
        )
        self._meter = WorkerMeter(
            worker=order.worker,
            node=host.node,
            function=self._spec.name,
            version=order.version,
            memory_bytes=self._spec.memory_bytes,
            origin_unix_ns=machine_origin_ns(),
        )

    # ── what others ask of it ──────────────────────────────────────────────────────────────────────

    def start(self) -> asyncio.Task[None]:
        """Publishes at once, so that nobody starts the same order twice."""
        self._publish("starting")
        self.task = asyncio.create_task(self._live(), name=f"worker-{self.order.worker}")
        return self.task

    def tell(self, order: WorkerOrder) -> None:
        """What is new of its pipeline."""
        self._role.tell(order)
        self._grow()

    def drain(self, grace_s: float | None = None) -> None:
        """Calls under way may end; none of them may take longer than the function's own limit."""
        if self.state == "starting":
            self.kill()
        if self.state != "ready" or self.body.process is None:
            return
        grace_s = self._spec.timeout_s if grace_s is None else grace_s
        self._drain_until_s = time.monotonic() + grace_s + DRAIN_MARGIN_S
        with contextlib.suppress(ChannelClosed):  # its end is on the way and will be heard
            self.body.process.send(Drain(grace_s=grace_s))
        self._publish("draining")
        self.body.events.put_nowait(Drained())  # wakes the task, which then minds the new deadline

    def kill(self) -> None:
        """At once, and it counts as ended, not as failed."""
        if self.task is None or self._ending:
            return
        self._ending = True
        if self._begun:  # a task that is cancelled before its first step never runs, nor ends in order
            self.task.cancel()

    def flush(self) -> None:
        """Its time until now, into the ledger."""
        self._host.rows.add(*self._meter.flush(time.monotonic_ns()))

    # ── its life ───────────────────────────────────────────────────────────────────────────────────

    async def _live(self) -> None:
        error: FleetError | None = None
        self._begun = True
        try:
            if not self._ending:
                await self._start()
                await self._serve()
        except asyncio.CancelledError:
            pass  # ordered away: kill() is the only one who cancels
        except FleetError as failure:
            error = failure
        except Exception as failure:
            log.exception("a worker ended in an unforeseen way", extra={"worker": self.order.worker})
            error = FleetError(f"{type(failure).__name__}: {failure}")
        self._ending = True
        await self._end(error)

    async def _start(self) -> None:
        """Errors: whatever kept it from getting ready."""
        timeout_s = self._spec.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                bundle_dir = await self._prepare()
                await self._assign(bundle_dir)
                await self._until_ready()
        except TimeoutError as error:
            raise StartFailed(
                f"the worker was not ready after {timeout_s:g} s",
                hint="fs logs shows how far it came; start_timeout_s is the limit",
            ) from error

    async def _prepare(self) -> str:
        """Bundle, segment and process, all at once; returns the bundle's folder."""
        spec, host = self._spec, self._host
        host.segments.room.make(spec.memory_bytes, f"a worker of {spec.name}")
        self.reserved_bytes = spec.memory_bytes
        host.segments.room.memory.shrink()
        checkpoints = [checkpoint for checkpoint in (spec.weights, spec.adapter) if checkpoint is not None]
        stages = [self._role.layers, None]
        self._start_cold = not all(map(host.segments.is_ready, checkpoints, stages))
        fresh = spec.network or not host.spares.has(spec.profile)
        fork = asyncio.ensure_future(host.spares.fork(spec.profile, network=spec.network)) if fresh else None
        weights = asyncio.ensure_future(host.segments.acquire_all(checkpoints, self.order.worker, self._role.layers))
        try:
            bundle = host.bundles.ready(spec.bundle) or await host.bundles.get(spec.bundle)
            self._segments = await weights
            if fork is None and (process := host.spares.take(spec.profile)) is not None:
                self._pooled = True
            else:
                process = await (fork or host.spares.fork(spec.profile, network=False))
            self.body.adopt(process)
        finally:
            await self._settle(fork, weights)
        return str(bundle)

    async def _settle(self, fork: asyncio.Future[Process] | None, weights: asyncio.Future[list[Segment]]) -> None:
        """What was begun and then not needed: given back, whatever it came to."""
        if fork is not None and self.body.process is None:
            fork.cancel()
            outcome = (await asyncio.gather(fork, return_exceptions=True))[0]
            if isinstance(outcome, Process):
                self.body.adopt(outcome)
        if not self._segments:
            weights.cancel()
            acquired = (await asyncio.gather(weights, return_exceptions=True))[0]
            if isinstance(acquired, list):
                self._segments = acquired

    async def _assign(self, bundle_dir: str) -> None:
        try:
            self._send_assignment(bundle_dir)
        except ChannelClosed as error:
            if not self._pooled or self.body.process is None:
                raise StartFailed(f"the worker was gone before it had its function: {error}") from error
            log.warning("a spare worker was dead, forking another", extra={"worker": self.order.worker})
            await self.body.bury()
            self._pooled = False
            self.body.adopt(await self._host.spares.fork(self._spec.profile, network=False))
            try:
                self._send_assignment(bundle_dir)
            except ChannelClosed as again:
                raise StartFailed(f"the worker was gone before it had its function: {again}") from again

    def _send_assignment(self, bundle_dir: str) -> None:
        process = self.body.process
        assert process is not None
        if process.group is not None:
            try:
                process.group.limit(self._spec.memory_bytes)
            except OSError as error:
                raise out_of_memory(self._spec.memory_bytes) from error
        with _listening_socket(self._host.address) as listener:
            host, port = listener.getsockname()[:2]
            self._endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            of_segments = [segment.descriptors() for segment in self._segments]
            threads = self._spec.llm.threads if self._spec.llm is not None else 0
            message = Assign(
                worker=self.order.worker,
                version=self.order.version,
                spec=self._spec,
                stage=self.order.stage,
                secret=self.order.secret,
                bundle_dir=bundle_dir,
                token=self._token,
                threads=threads or self._host.cpus,
                slabs=[len(descriptors) - 1 for descriptors in of_segments],
            )
            process.send(message, (listener.fileno(), *self._role.descriptors(), *chain.from_iterable(of_segments)))
        self._assigned_ns = time.monotonic_ns()
        self._role.assigned(process)

    async def _until_ready(self) -> None:
        while True:
            match await self.body.events.get():
                case Pooled(started_ns=started_ns) if not self._pooled:
                    self._assigned_ns = max(self._assigned_ns, started_ns)
                case Want() as want:
                    self._fetch_first(want)
                case Whole():
                    self._role.whole = True
                case Ready(timeline=timeline):
                    self._became_ready(timeline)
                    return
                case StartError(error=info, timeline=timeline):
                    self._close_timeline(timeline)
                    raise self._root_cause(info)
                case ChannelGone():
                    status = await self.body.exit_status()
                    raise self._why(status)
                case Exit(status=status):
                    raise self._why(status)
                case _:
                    pass

    def _fetch_first(self, want: Want) -> None:
        """It may ask for anything; what its weights do not have is not fetched."""
        if self._segments:
            self._host.segments.first(self._segments[0], want.first, want.last)

    def _became_ready(self, timeline: Timeline) -> None:
        now_ns = time.monotonic_ns()
        self._close_timeline(timeline)
        self._publish("ready")
        self._host.rows.add(self._meter.phase("load", self._assigned_ns, now_ns))
        self._meter.ready(now_ns)
        names = dict.fromkeys(phase.name for phase in self._timeline.phases)
        phases = {name: round(self._timeline.total_ms(name), 1) for name in names}
        self._log("system", f"worker ready after {(now_ns - self.seen_ns) / 1e6:.0f} ms")
        log.info("worker ready", extra={"worker": self.order.worker, "function": self._spec.name, "phases_ms": phases})
        self._grow()

    def _grow(self) -> None:
        if self.state == "ready" and self._segments:
            self._role.grow(self._host.segments, self._segments[0])

    def _became_whole(self) -> None:
        self._role.whole = True
        took_ms = (time.monotonic_ns() - self.seen_ns) / 1e6
        self._log("system", f"worker has the whole model {took_ms:.0f} ms after its order")
        self._publish(self.state)

    def _close_timeline(self, timeline: Timeline) -> None:
        """The node's phases, then the worker's own; and their rows, except for what comes after the start."""
        self._timeline.add("start", self.seen_ns, self._assigned_ns)
        self._host.rows.add(self._meter.phase("start", self.seen_ns, self._assigned_ns))
        if self._segments and self._start_cold:
            begun_ns = min(segment.fetch_span_ns[0] for segment in self._segments)
            ends_ns = [segment.fetch_span_ns[1] for segment in self._segments]
            ended_ns = max(ends_ns) if all(ends_ns) else 0
            begun_ns = max(begun_ns, self.seen_ns)
            ended_ns = ended_ns or time.monotonic_ns()
            self._timeline.add("fetch", begun_ns, ended_ns)
            self._host.rows.add(self._meter.phase("fetch", begun_ns, ended_ns))
        self._timeline.join(timeline)

    async def _serve(self) -> None:
        """Returns when a drained worker has ended. Errors: why it ended otherwise."""
        while True:
            timeout_s = None
            if self._drain_until_s is not None:
                timeout_s = max(0.0, self._drain_until_s - time.monotonic())
            try:
                # Not wait_for: in Python 3.11 it can swallow the cancellation by which kill() speaks.
                async with asyncio.timeout(timeout_s):
                    event = await self.body.events.get()
            except TimeoutError:
                self._log("system", "worker did not end in its time to drain: killed")
                return
            match event:
                case Usage(busy_ns=busy_ns, speed=speed):
                    self._meter.busy(busy_ns)
                    if speed is not None:
                        self._host.speeds.note(f"{self._spec.name}@{self.order.version}", self.order.worker, speed)
                case Want() as want:
                    self._fetch_first(want)
                case Whole():
                    self._became_whole()
                case ChannelGone():
                    self._require_draining(await self.body.exit_status())
                    return
                case Exit(status=status):
                    self._require_draining(status)
                    return
                case _:
                    pass

    def _require_draining(self, status: int | None) -> None:
        if self._drain_until_s is None:
            raise self._why(status)

    # ── its end ────────────────────────────────────────────────────────────────────────────────────

    async def _end(self, error: FleetError | None) -> None:
        now_ns = time.monotonic_ns()
        was_ready = self._meter.is_running
        if error is not None and self.body.process is not None and self._assigned_ns and not was_ready:
            await self.body.exit_status()  # its last words belong before ours
        self._endpoint = ""
        info = error.info() if error is not None else None
        if info is not None:
            self._log("system", f"worker {'ended' if was_ready else 'failed to start'}: {info.message}")
        self._publish("failed" if info is not None else "gone", info)
        if was_ready:
            self.flush()
        elif error is not None:
            self._host.rows.add(self._meter.phase("failed", self._assigned_ns or self.seen_ns, now_ns))
        await self.body.bury()
        self._host.speeds.forget(self.order.worker)
        self._role.close()
        self.reserved_bytes = 0
        for segment in self._segments:
            self._host.segments.release(segment, self.order.worker)
        self._segments = []

    def _why(self, status: int | None) -> FleetError:
        if not self.body.ran_out_of_memory and (error := self._segment_error()) is not None:
            return error
        return self.body.why(status, limit_bytes=self._spec.memory_bytes, was_ready=self._meter.is_running)

    def _root_cause(self, info: ErrorInfo) -> FleetError:
        """A worker that could not get its weights says so; why, the segment knows best."""
        return self._segment_error() or error_from(info)

    def _segment_error(self) -> FleetError | None:
        return next((segment.error for segment in self._segments if segment.error is not None), None)

    # ── what it tells ──────────────────────────────────────────────────────────────────────────────

    def _log(self, stream: Stream, text: str) -> None:
        self._host.logs.write(self._spec.name, self.order.worker, self.order.version, stream, text)

    def _publish(self, state: WorkerState, error: ErrorInfo | None = None) -> None:
        self.state = state
        called = state in ("ready", "draining") and self._role.serves
        self._host.publish(
            WorkerStatus(
                worker=self.order.worker,
                node=self._host.node,
                function=self._spec.name,
                version=self.order.version,
                state=state,
                start="cold" if self._start_cold else "warm",
                pooled=self._pooled,
                isolation=self.body.process.isolation if self.body.process is not None else "",
                endpoint=self._endpoint if called else "",
                token=self._token if called else "",
                link=self._role.link,
                whole=self._role.whole,
                relayed=self._role.relayed,
                error=error,
                timeline=self._timeline,
                changed_unix_ns=time.time_ns(),
            )
        )

    @property
    def ended(self) -> bool:
        return self.state in FINAL


def _listening_socket(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, 0))
        listener.listen(LISTEN_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
