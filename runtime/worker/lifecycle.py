"""Worker lifecycle: pooled, assigned, ready, drained.

Forked by the fork server, a worker sends `Pooled` and waits. Everything that does not depend on the function happens
before that (imports, the event loop), so that `Assign` to `Ready` is short: confine the process (`isolation`), start
the function (`function_start`), serve it (`call_gate`, `server`). A worker that is prepared for one version is confined
before its assignment, and has imported what the version needs of its packages. It ends with its control socket.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
import time
from collections.abc import Callable
from socket import socket
from typing import TYPE_CHECKING, NoReturn

import msgspec
import uvloop

from ..contract.errors import FleetError, StartFailed
from ..contract.node import exit_codes
from ..contract.node.channel import Channel, ChannelClosed
from ..contract.node.messages import (
    Assign,
    ClientConnection,
    Consolidated,
    DaemonMessage,
    Drain,
    Drained,
    Imported,
    Pooled,
    Prepare,
    Prepared,
    Ready,
    StandBy,
    StartError,
    Usage,
    Wake,
    WantChunks,
)
from ..contract.node.orders import SecondEngine
from ..contract.node.speed import Speed
from ..contract.process.redaction import Redactor
from ..contract.timeline import Timeline
from ..isolation.worker_environment import WorkerEnvironment
from ..pipeline.node_messages import NodeMessages
from ..worker_io.call_links import CallLinks
from ..worker_io.standby import WorkerStandby
from . import watchdog
from .call_gate import CallGate, Meter, redact_errors
from .device_binding import bind_devices
from .egress_socket import open_egress_socket
from .entered_calls import EnteredCallWriter
from .function_start import StartContext, StartedApp, start
from .kept_answers import KeptAnswers
from .server import WorkerServer

if TYPE_CHECKING:
    from ..llm.tensor_parallel.rank_process import RankProcesses

USAGE_EVERY_S = 1.0
SPARE_AFTER_S = 0.05
"""Wait for an assignment before the worker counts as spare: one that was forked for a call has it by then."""
CLOSE_S = 2.0
"""Least time for close hooks after the calls have ended: an engine ends its thread. The process ends anyway."""


def run(control: socket, environment: WorkerEnvironment) -> NoReturn:
    """Runs the worker to its end. Never returns; exits with a code of `contract.node.exit_codes`."""
    started_ns = time.monotonic_ns() + environment.clock_shift_ns
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    channel: Channel[DaemonMessage] = Channel(control, DaemonMessage)
    try:
        channel.send(Pooled(started_ns))
        _warm_up_while_idle(control)
        message, descriptors = channel.receive()
        prepared_dir = ""
        if isinstance(message, Prepare):
            prepared_dir = _prepare(message, environment, descriptors)
            channel.send(Prepared())
            message, descriptors = channel.receive()
    except ChannelClosed:
        watchdog.end_process(exit_codes.ORPHANED)
    if not isinstance(message, Assign):
        watchdog.end_process(exit_codes.DRAINED)
    AssignedWorker(channel, message, loop, prepared_dir).run(environment, descriptors)


def _prepare(message: Prepare, environment: WorkerEnvironment, descriptors: list[int]) -> str:
    """Confines the process for a version and imports modules of its packages; returns the bundle's folder. Errors:
    OSError."""
    from .layer_imports import import_modules  # late: most functions have no packages of their own

    bundle_dir = environment.prepare(message, descriptors)
    layer_dir = environment.layer_folder(message.layer_dir)
    os.environ.update(message.spec.env)
    _set_import_path(bundle_dir, layer_dir, message.threads)
    import_modules(message.modules, layer_dir)
    _flush()
    return bundle_dir


def _set_import_path(bundle_dir: str, layer_dir: str, threads: int) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    sys.path.insert(0, bundle_dir)
    if layer_dir:
        from .layer_path import add_layer  # late: most functions have none

        add_layer(layer_dir)
    sys.dont_write_bytecode = True


def _warm_up_while_idle(control: socket) -> None:
    """Binds a few tensors once in a spare worker: the second time is five times faster."""
    is_spare = not select.select([control], [], [], SPARE_AFTER_S)[0]
    if is_spare and "torch" in sys.modules:
        from ..weights.warmup import warm_up_weights

        warm_up_weights()


class AssignedWorker:
    """A worker after its assignment: confined, started, served, drained."""

    def __init__(
        self, channel: Channel[DaemonMessage], assign: Assign, loop: asyncio.AbstractEventLoop, prepared_dir: str = ""
    ) -> None:
        """`prepared_dir`: the bundle's folder, if the process was prepared for this version."""
        self._prepared_dir = prepared_dir
        self._layer_dir = ""
        self._channel = channel
        self._assign = assign
        self._loop = loop
        self._meter = Meter(assign.spec.concurrency)
        self._timeline = Timeline()
        self._finished = asyncio.Event()
        self._grace_ends_s = 0.0
        self._links = CallLinks() if assign.spec.calls else None
        self._node_messages: NodeMessages | None = None
        self._reporter = UsageReporter(loop, self._meter, self._send)
        self._listener: WorkerServer | None = None
        self._standby: WorkerStandby | None = None
        self._entered: EnteredCallWriter | None = None

    def run(self, environment: WorkerEnvironment, descriptors: list[int]) -> NoReturn:
        """Runs the assignment to its end; never returns."""
        try:
            bind_devices(self._assign.binding)
            self._layer_dir = environment.layer_folder(self._assign.layer_dir)
            bundle_dir, listening = self._confine(environment, descriptors)
            self._entered = EnteredCallWriter(descriptors.pop(0))
            self._provide_volumes(environment, descriptors)
            ranks = self._fork_ranks(descriptors)  # before there is any thread
            watchdog.watch(self._channel.fileno(), self._meter)
            if self._assign.shell:
                from .shell import ShellApp  # late: calls need none of it

                terminal = StartedApp(ShellApp(self._finished.set, self._loop), True, None)
                self._loop.run_until_complete(self._serve(terminal, listening, bundle_dir))
                watchdog.end_process(exit_codes.DRAINED)
            self._node_messages = self._receive_stage_messages(descriptors)
            starting = StartContext(
                assign=self._assign,
                bundle_dir=bundle_dir,
                segment_fds=tuple(descriptors),
                loop=self._loop,
                want=lambda chunks: self._send(WantChunks(chunks[0], chunks[-1])),
                links=self._links,
                node_messages=self._node_messages,
                ranks=ranks,
                on_consolidated=lambda switch: self._send(Consolidated(switch)),
                on_end=lambda why: self._loop.call_soon_threadsafe(self._stage_ended, why),
            )
            started = start(starting, self._timeline)
            self._loop.run_until_complete(self._serve(started, listening, bundle_dir))
        except FleetError as error:
            self._fail(error)
        except ChannelClosed:
            watchdog.end_process(exit_codes.ORPHANED)
        _flush()
        watchdog.end_process(exit_codes.DRAINED)

    def _provide_volumes(self, environment: WorkerEnvironment, descriptors: list[int]) -> None:
        """Takes the stream for commits from the descriptors, if there is a volume to write."""
        volumes = self._assign.volumes
        if volumes:
            from ..sdk.volumes import provide_volumes  # late: most functions have none

            stream = socket(fileno=descriptors.pop(0)) if any(one.write for one in volumes) else None
            provide_volumes([(one, environment.volume_folder(one)) for one in volumes], stream)

    def _fork_ranks(self, segment_fds: list[int]) -> RankProcesses | None:
        """Forks the other ranks of a model that is split over devices. Errors: InvalidSpec."""
        settings = self._assign.spec.llm
        if settings is None or settings.tensor_parallel_size == 1:
            return None
        from ..llm.tensor_parallel.rank_fork import fork_ranks  # late: few models are split

        return fork_ranks(self._assign, segment_fds, _end_with_rank)

    def _receive_stage_messages(self, descriptors: list[int]) -> NodeMessages | None:
        """For a pipeline stage, receives messages in a thread; takes the links' listener from the descriptors."""
        if self._assign.stage is None:
            return None
        node_messages = NodeMessages(socket(fileno=descriptors.pop(0)))
        self._channel.socket.setblocking(False)
        node_messages.hear(
            self._channel,
            lambda message: self._loop.call_soon_threadsafe(self._handle, message),
            lambda: watchdog.end_process(exit_codes.ORPHANED),
        )
        return node_messages

    def _stage_ended(self, why: str) -> None:
        """Ends the process if the stage failed; a dismissed stage is drained by its node."""
        if why:
            print(f"the stage ends: {why}", file=sys.stderr, flush=True)
            watchdog.end_process(exit_codes.ORPHANED)

    def _confine(self, environment: WorkerEnvironment, descriptors: list[int]) -> tuple[str, socket | None]:
        """Confines the process before user code runs; returns the bundle's folder and the listening socket."""
        spec = self._assign.spec
        with self._timeline.span("start"):
            listening: socket | None
            try:
                if self._prepared_dir:
                    bundle_dir, listening = self._prepared_dir, socket(fileno=descriptors.pop(0))
                else:
                    bundle_dir, listening = environment.confine(self._assign, descriptors)
                if spec.egress:
                    os.environ.update(open_egress_socket(self._channel.send))
            except OSError as error:
                raise StartFailed(f"the worker could not be confined: {error}") from error
            os.environ.update(spec.env)
            os.environ.update(self._assign.secrets)
            if not self._prepared_dir:
                _set_import_path(bundle_dir, self._layer_dir, self._assign.threads)
        return bundle_dir, listening

    async def _serve(self, started: StartedApp, listening: socket | None, bundle_dir: str) -> None:
        gate = CallGate(
            started.app,
            token=self._assign.token,
            meter=self._meter,
            bundle_dir=bundle_dir,
            changed=self._changed,
            sockets=started.lifespan,
            network=self._assign.spec.network,
            entering=self._entered.write if self._entered is not None else lambda number, request: None,
            links=self._links,
        )
        app = KeptAnswers(redact_errors(gate, Redactor(self._assign.secrets.values())), token=self._assign.token)
        listener = self._listener = WorkerServer(app, lifespan=started.lifespan)
        try:
            await listener.start(listening)
        except RuntimeError as error:
            raise StartFailed(str(error)) from error
        self._reporter.speed = started.speed
        self._reporter.second_engine = started.second_engine
        self._standby = WorkerStandby(started.standby, self._meter, self._loop, self._send, self._cannot_wake)
        self._channel.send(Ready(self._timeline, started.loaded()))
        self._report_imports()
        if self._node_messages is None:
            self._channel.socket.setblocking(False)
            self._loop.add_reader(self._channel.fileno(), self._on_control_readable)
        await self._finished.wait()
        if started.close is not None:
            await self._close(started.close, started.close_s)
        await listener.stop()
        self._reporter.report()
        self._report_imports()
        self._send(Drained())

    def _report_imports(self) -> None:
        """Reports which modules of its packages the function has imported, so that later workers can be prepared."""
        if self._layer_dir and not self._assign.shell:
            from .layer_imports import imported_modules  # late: most functions have none

            self._send(Imported(imported_modules(sys.modules, self._layer_dir)))

    async def _close(self, close: Callable[[], None], most_s: float) -> None:
        """Runs the close hooks in a thread, since the loop must still send the responses of aborted calls."""
        limit_s = max(CLOSE_S, min(most_s, self._grace_ends_s - self._loop.time()))
        try:
            await asyncio.wait_for(self._loop.run_in_executor(None, close), limit_s)
        except TimeoutError:
            print(f"closing took longer than the {limit_s:.3g} s that it had", file=sys.stderr, flush=True)

    def _on_control_readable(self) -> None:
        try:
            message, descriptors = self._channel.receive()
        except BlockingIOError:
            return
        except ChannelClosed:
            watchdog.end_process(exit_codes.ORPHANED)
        if isinstance(message, ClientConnection) and self._listener is not None and descriptors:
            self._listener.serve_connection(socket(fileno=descriptors.pop()))
        for descriptor in descriptors:
            os.close(descriptor)
        self._handle(message)

    def _handle(self, message: DaemonMessage) -> None:
        if isinstance(message, Drain):
            self._meter.draining = True
            self._grace_ends_s = self._loop.time() + message.grace_s
            self._loop.call_later(message.grace_s, self._finished.set)
            self._changed()
        elif isinstance(message, StandBy | Wake) and self._standby is not None:
            self._standby.handle(message)

    def _cannot_wake(self, error: FleetError) -> None:
        """Ends the process, whose weights are gone."""
        self._fail(error)

    def _changed(self) -> None:
        self._reporter.changed()
        if self._standby is not None:
            self._standby.on_calls_changed()
        if self._meter.draining and not self._meter.running:
            self._finished.set()

    def _send(self, message: msgspec.Struct) -> bool:
        """Sends a message; False if the daemon is behind with reading, and the next report repeats it."""
        try:
            self._channel.send(message)
        except ChannelClosed as error:
            if isinstance(error.__cause__, BlockingIOError):
                return False
            watchdog.end_process(exit_codes.ORPHANED)
        return True

    def _fail(self, error: FleetError) -> NoReturn:
        _flush()
        try:
            self._channel.send(StartError(error.info(), self._timeline))
        except ChannelClosed:
            watchdog.end_process(exit_codes.ORPHANED)
        watchdog.end_process(exit_codes.START_FAILED)


class UsageReporter:
    """Reports usage when it changed, at most once in USAGE_EVERY_S; an idle worker sends nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop, meter: Meter, send: Callable[[msgspec.Struct], bool]) -> None:
        self._loop = loop
        self._meter = meter
        self._send = send
        self.speed: Callable[[], Speed | None] | None = None
        """Speed of the LLM engine, if there is one."""
        self.second_engine: Callable[[], SecondEngine | None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at = -USAGE_EVERY_S

    def changed(self) -> None:
        """Schedules a report."""
        if self._timer is None:
            wait_s = max(0.0, self._sent_at + USAGE_EVERY_S - self._loop.time())
            self._timer = self._loop.call_later(wait_s, self.report)

    def report(self) -> None:
        """Sends a report now, and schedules the next one while calls run."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._sent_at = self._loop.time()
        sent = self._send(self._usage())
        if self._meter.running or not sent:
            self._timer = self._loop.call_later(USAGE_EVERY_S, self.report)

    def _usage(self) -> Usage:
        """Usage with the engine's own speed, which leaves out rejected and aborted calls, and the gate's call times."""
        usage = msgspec.structs.replace(self._meter.usage(time.monotonic_ns()), second_engine=self.second_engine())
        if self.speed is None or usage.speed is None:
            return usage
        engine = self.speed()
        speed = msgspec.structs.replace(engine, call_s=usage.speed.call_s) if engine is not None else None
        return msgspec.structs.replace(usage, speed=speed)


def _end_with_rank(reason: str) -> NoReturn:
    os.write(2, f"{reason}: this worker ends\n".encode())
    watchdog.end_process(exit_codes.RANK_LOST)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # closed by user code or by its reader: an error could not be reported either
