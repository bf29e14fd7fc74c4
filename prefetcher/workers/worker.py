"""The lifecycle of one ordered worker: prepare, assign, ready, serve, end.

Each worker is one task. Its process and the reconciler reach it through one queue of events; killing it cancels the
task, at any point. However it ends, it publishes one final status, its process is dead, its control group removed,
its segments unpinned and its time in the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from fleetstart.runtime.contract.errors import ErrorInfo, FleetError, StartFailed, error_from
from fleetstart.runtime.contract.node import exit_codes
from fleetstart.runtime.contract.node.channel import ChannelClosed
from fleetstart.runtime.contract.node.entered_calls import EnteredCalls
from fleetstart.runtime.contract.node.messages import (
    Consolidated,
    Drain,
    Drained,
    EgressListener,
    Imported,
    Pooled,
    Ready,
    StartError,
    StoodBy,
    Usage,
    WantChunks,
    Woken,
)
from fleetstart.runtime.contract.node.orders import FINAL, WorkerOrder, WorkerState, WorkerStatus
from fleetstart.runtime.contract.node.speed import ModeSwitch
from fleetstart.runtime.contract.process.redaction import Redactor
from fleetstart.runtime.contract.timeline import Timeline

from ..network.egress_proxy import EgressTraffic
from ..processes.consumption import Consumption
from ..processes.exit_reasons import device_out_of_memory
from ..processes.forked_process import ChannelEnded, ProcessExited
from ..segments.segment import Segment
from ..stage_links.stage_links import PipelineMembership
from .node_services import NodeServices
from .standby import Standby
from .worker_process import WorkerProcess
from .worker_record import WorkerRecord
from .worker_resources import WorkerResources

log = logging.getLogger(__name__)

DRAIN_MARGIN_S = 2.0
"""Time beyond a drain's grace period for the worker to report and exit."""
IMPORTS_LEARNED_MAX = 2
"""When it is ready, and when it was drained."""


class Worker:
    """One worker. Owns its order; process, resources, record and pipeline membership are its parts."""

    def __init__(self, order: WorkerOrder, services: NodeServices) -> None:
        """Errors: OSError if no port can be opened for its stage."""
        self.order = order
        self.state: WorkerState = "starting"
        self.task: asyncio.Task[None] | None = None
        self.record = WorkerRecord(order, services, self._consumption)
        self.process = WorkerProcess(order.worker, services.prefork_pool, self.record.on_output)
        self._services = services
        self._membership = PipelineMembership(
            order,
            services.address,
            services.relays,
            note=lambda text: self.record.log_line("system", text),
            changed=lambda: self._publish(self.state),
        )
        self.resources = WorkerResources(services, self._membership, self.process)
        self._standby = Standby(order, self.process, self.resources, self.record)
        self._drain_until_s: float | None = None
        self._drained = False
        self._rejected: FleetError | None = None
        self._entered: EnteredCalls | None = None
        self._begun = False
        self._ending = False
        self._imports_learned = 0
        self._fetched: dict[str, int] = {}
        self._switch: ModeSwitch | None = None
        self._close_egress: Callable[[], None] = lambda: None
        self._egress = EgressTraffic()
        """Its own part of what the node's proxies have carried."""

    # ── commands ───────────────────────────────────────────────────────────────────────────────────

    def start(self) -> asyncio.Task[None]:
        """Starts the task. Publishes a status at once, so that the order is not started twice."""
        self._publish("starting")
        self.task = asyncio.create_task(self._run(), name=f"worker-{self.order.worker}")
        return self.task

    def update(self, order: WorkerOrder) -> None:
        """Applies what changed in the order about its pipeline, and where its weights come from."""
        self._membership.update(order)
        self.resources.feed(order)
        self._grow()

    def drain(self, grace_s: float | None = None) -> None:
        """Stops new calls; calls in progress may finish within the grace period, by default the function's own
        limit."""
        if self.state == "starting" or self._standby.given_back:
            self.kill()
            return
        if self.state not in ("ready", "standby") or self.process.forked is None:
            return
        grace_s = self.order.spec.timeout_s if grace_s is None else grace_s
        self._drain_until_s = time.monotonic() + grace_s + DRAIN_MARGIN_S
        with contextlib.suppress(ChannelClosed):  # its exit event is on the way
            self.process.forked.send(Drain(grace_s=grace_s))
        self._publish("draining")
        self.process.events.put_nowait(Drained())  # wakes the task, which then applies the new deadline

    def stand_by(self) -> None:
        """Stops new calls; once those in progress have ended, the worker gives its weights back."""
        if self.state == "ready" and self._standby.begin():
            self._publish("standby")

    def wake(self) -> None:
        """Makes the worker take its weights again; it ends if the node has no memory for it any more."""
        if self.state != "standby":
            return
        try:
            if self._standby.wake():
                self._publish("standby")
        except FleetError as error:
            self.reject(error)

    def reject(self, error: FleetError) -> None:
        """Ends the worker at once with an error, because of something that it was given."""
        self._rejected = self._rejected or error
        self.process.events.put_nowait(Drained())  # wakes the task

    def kill(self) -> None:
        """Ends the worker at once. Counts as ended, not as failed."""
        if self.task is None or self._ending:
            return
        self._ending = True
        if self._begun:  # a task that is cancelled before its first step never runs, nor ends in order
            self.task.cancel()

    # ── lifecycle ──────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        error: FleetError | None = None
        self._begun = True
        try:
            if not self._ending:
                await self._start()
                await self._serve()
        except asyncio.CancelledError:
            pass  # only kill() cancels
        except FleetError as failure:
            error = failure
        except Exception as failure:
            log.exception("unexpected error in a worker's task", extra={"worker": self.order.worker})
            error = FleetError(f"{type(failure).__name__}: {failure}")
        self._ending = True
        await self._end(error)

    async def _start(self) -> None:
        """Prepares, assigns and waits until ready. Errors: FleetError, the reason why it did not become ready."""
        timeout_s = self.order.spec.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                self.resources.secrets = self._services.decryptor.decrypt(self.order)
                self.record.redactor = Redactor(self.resources.secrets.values())
                bundle_dir = await self.resources.prepare(self.order)
                await self.resources.assign(self.order, bundle_dir)
                watches = [asyncio.ensure_future(self._reject_without(one)) for one in self.resources.segments]
                try:
                    await self._until_ready()
                finally:
                    for watch in watches:
                        watch.cancel()
        except TimeoutError as error:
            raise StartFailed(
                f"the worker was not ready after {timeout_s:g} s",
                hint="fs logs shows how far it came; start_timeout_s is the limit",
            ) from error

    async def _reject_without(self, segment: Segment) -> None:
        """Ends the start if a segment of its weights fails before its process runs: that of a sandbox takes seconds
        to. One that runs says itself how far it came."""
        await segment.filled.wait()
        if segment.error is not None and not self.resources.running:
            self.reject(segment.error)

    async def _until_ready(self) -> None:
        while True:
            self._require_accepted()
            match await self.process.events.get():
                case Pooled(started_ns=started_ns):
                    self.resources.on_running(started_ns)
                case EgressListener():
                    self._open_egress()
                case WantChunks(first=first, last=last):
                    self.resources.prioritize(first, last)
                case Consolidated(switch=switch):
                    self._membership.whole = True
                    self._switch = switch
                case Ready(timeline=timeline, loaded=loaded):
                    self._services.devices.loaded(self.order.worker, loaded)
                    self._became_ready(timeline)
                    return
                case StartError(error=info, timeline=timeline):
                    self._started(timeline)
                    raise self._root_cause(info)
                case ChannelEnded():
                    status = await self.process.exit_status()
                    raise self._exit_error(status)
                case ProcessExited(status=status):
                    raise self._exit_error(status)
                case _:
                    pass

    def _open_egress(self) -> None:
        """Opens the egress proxy for a function that has a list of allowed destinations."""
        process = self.process.forked
        if process is None or not self.order.spec.egress or (descriptor := process.take_outlet()) is None:
            return  # sent by user code: closed with the process
        listener = socket.socket(fileno=descriptor)
        self._close_egress = self._services.egress.open(
            listener, self.order.spec.egress, lambda text: self.record.log_line("system", text), self._egress
        )

    def note_devices(self, used_bytes: Mapping[int, int]) -> None:
        """Takes a look at the memory of GPUs that each process of the node has."""
        if self.order.devices and (pids := self.process.pids()) & used_bytes.keys():
            self.record.consumed.note_device(sum(used_bytes.get(pid, 0) for pid in pids))

    def _consumption(self) -> Consumption:
        """What it has used so far. Of the network only what its function lists is counted: without a list it has none,
        or the node's, in which bytes are not counted by process."""
        used = self.process.consumption()
        if not self.order.spec.egress:
            return used
        return replace(used, received_bytes=self._egress.received_bytes, sent_bytes=self._egress.sent_bytes)

    def _started(self, timeline: Timeline) -> None:
        """Records the phases of the start, whether it succeeded or failed."""
        self._fetched = self.resources.fetched
        self.record.started(self.resources.assigned_ns, self.resources.fetched_ns(self.record.seen_ns), timeline)

    def _became_ready(self, timeline: Timeline) -> None:
        self._started(timeline)
        self._publish("ready")
        pid = self.process.forked.pid if self.process.forked is not None else 0
        self.record.ready(self.resources.assigned_ns, pid)
        self._grow()

    def _grow(self) -> None:
        if self.state == "ready":
            self.resources.grow()

    def _decoded_bytes(self) -> int:
        """The weights that a token of its model reads; 0 if it has none, or a stage of it."""
        order, segments = self.order, self.resources.segments
        if order.spec.llm is None or order.stage is not None or not segments or segments[0].manifest is None:
            return 0
        return segments[0].manifest.weight_bytes

    def _became_whole(self, switch: ModeSwitch | None) -> None:
        if self._membership.whole:
            return  # sent by user code
        self._membership.whole = True
        self._switch = switch
        self.record.became_whole()
        self._publish(self.state)

    async def _serve(self) -> None:
        """Handles events until a drained worker has exited. Errors: FleetError if it ends unexpectedly."""
        while True:
            self._require_accepted()
            timeout_s = None
            if self._drain_until_s is not None:
                timeout_s = max(0.0, self._drain_until_s - time.monotonic())
            try:
                # Not wait_for: in Python 3.11 it can swallow the cancellation of kill().
                async with asyncio.timeout(timeout_s):
                    event = await self.process.events.get()
            except TimeoutError:
                self.record.log_line("system", "worker did not end in its time to drain: killed")
                return
            match event:
                case Usage() as usage:
                    self.record.on_usage(usage, self._decoded_bytes())
                    if usage.second_engine is not None and self.record.on_second_engine(usage.second_engine):
                        self._publish(self.state)
                case WantChunks(first=first, last=last):
                    self.resources.prioritize(first, last)
                case Consolidated(switch=switch):
                    self._became_whole(switch)
                case Imported(modules=modules):
                    self._learn_imports(modules)
                case StoodBy():
                    if await self._standby.on_given_back(lambda: self.state == "standby"):
                        self._publish("standby")
                case Woken():
                    if self.state == "standby" and self._standby.on_woken():
                        self._publish("ready")
                case StartError(error=info) if self.state == "standby":
                    raise self._root_cause(info)
                case ChannelEnded():
                    self._require_draining(await self.process.exit_status())
                    return
                case ProcessExited(status=status):
                    self._require_draining(status)
                    return
                case _:
                    pass

    def _require_accepted(self) -> None:
        if self._rejected is not None:
            raise self._rejected

    def _learn_imports(self, modules: list[str]) -> None:
        """Takes a worker's list twice at most: it is sent by user code."""
        if self._imports_learned < IMPORTS_LEARNED_MAX:
            self._imports_learned += 1
            self._services.layer_spares.learn(self.order, modules)

    def _require_draining(self, status: int | None) -> None:
        if status is not None and self.resources.entered_calls is not None:  # without one it may still be dying
            self._entered = self.resources.entered_calls.read()
        self._drained = self._drain_until_s is not None and status == exit_codes.DRAINED
        if self._drain_until_s is None and not (self.order.shell and status == exit_codes.DRAINED):
            raise self._exit_error(status)

    # ── termination ────────────────────────────────────────────────────────────────────────────────

    async def _end(self, error: FleetError | None) -> None:
        ended_ns = time.monotonic_ns()
        was_ready, assigned_ns = self.record.was_ready, self.resources.assigned_ns
        if error is not None and self.resources.running and assigned_ns and not was_ready:
            await self.process.exit_status()  # its last log lines belong before ours
        info = self.record.redacted(error.info()) if error is not None else None
        if info is not None:
            self.record.log_line("system", f"worker {'ended' if was_ready else 'failed to start'}: {info.message}")
            log.warning(
                "worker ended by itself" if was_ready else "worker failed to start",
                extra={
                    "worker": self.order.worker,
                    "function": self.order.spec.name,
                    "error": info.message,
                    **({"request": self.order.cause} if self.order.cause and not was_ready else {}),
                },
            )
        if info is not None and self.resources.prepared and not was_ready:
            self._services.layer_spares.distrust(self.order)
        self._publish("failed" if info is not None else "gone", info)
        self.record.ended((assigned_ns or self.record.seen_ns, ended_ns), failed=error is not None)
        await self.process.terminate()
        self._close_egress()
        self._membership.close()
        self.resources.release(self.order.worker)

    def _exit_error(self, status: int | None) -> FleetError:
        if not self.process.ran_out_of_memory and (error := self.resources.segment_error) is not None:
            return error
        if self.process.ran_out_of_memory and self.resources.limit_bytes > self.order.spec.memory_bytes:
            return device_out_of_memory(self.order.devices)  # the limit is that of its share of a CPU device
        return self.process.exit_error(
            status,
            limit_bytes=self.resources.limit_bytes or self.order.spec.memory_bytes,
            was_ready=self.record.was_ready,
        )

    def _root_cause(self, info: ErrorInfo) -> FleetError:
        """The segment's error, if it has one: it explains better why the worker could not get its weights."""
        return self.resources.segment_error or error_from(info)

    def _publish(self, state: WorkerState, error: ErrorInfo | None = None) -> None:
        self.state = state
        called = state in ("ready", "draining") and self._membership.serves
        device_type, device_bytes = self._services.devices.use_of(self.order.devices)
        first: Literal["cold", "warm"] = "cold" if self.resources.cold else "warm"
        self._services.publish(
            WorkerStatus(
                worker=self.order.worker,
                node=self._services.node,
                function=self.order.spec.name,
                version=self.order.version,
                state=state,
                start="standby" if self._standby.served_again else first,
                pooled=self.resources.pooled,
                isolation=self.process.forked.isolation if self.process.forked is not None else "",
                endpoint=self.resources.endpoint if called else "",
                token=self.resources.token if called else "",
                link=self._membership.link,
                whole=self._membership.whole,
                switch=self._switch if self._switch is not None and self._switch.possible else None,
                relayed=self._membership.relayed,
                fetched=self._fetched,
                device_type=device_type,
                device_bytes=0 if self._standby.given_back else device_bytes,
                memory_bytes=self.resources.reserved_bytes if self._standby.given_back else 0,
                second_engine=self.record.second_engine,
                error=error,
                timeline=self.record.timeline,
                changed_unix_ns=time.time_ns(),
                shell=self.order.shell,
                served=self.record.was_ready,
                drained=self._drained,
                entered=self._entered if state in FINAL else None,
            )
        )
