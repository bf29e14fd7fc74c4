"""One ordered worker's life, told straight down: prepare, assign, ready, serve, end.

Each worker is one task. Its process, the reconciler and the clock speak to it through one queue; being
ordered away cancels it, at whatever point it is. Whatever happens, it ends in one final status, with its
process dead, its group removed, its segment unpinned and its time in the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable

from fleetstart.runtime.contract.errors import ErrorInfo, FleetError, StartFailed, error_from
from fleetstart.runtime.contract.node import exit_codes as exits
from fleetstart.runtime.contract.node.channel import ChannelClosed
from fleetstart.runtime.contract.node.messages import (
    Consolidated,
    Drain,
    Drained,
    EgressListener,
    Pooled,
    Ready,
    StartError,
    Usage,
    WantChunks,
)
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerState, WorkerStatus
from fleetstart.runtime.contract.process.redaction import Redactor
from fleetstart.runtime.contract.timeline import Timeline

from ..drivers.forked_process import ChannelEnded, ProcessExited
from ..stage_links.stage_links import PipelineMembership
from .node_services import NodeServices
from .worker_process import WorkerProcess
from .worker_record import WorkerRecord
from .worker_resources import WorkerResources

log = logging.getLogger(__name__)

DRAIN_MARGIN_S = 2.0
"""Beyond a drain's grace, for the worker to say so and go."""


class Worker:
    def __init__(self, order: WorkerOrder, host: NodeServices) -> None:
        """Errors: OSError if no port can be opened for its stage."""
        self.order = order
        self.state: WorkerState = "starting"
        self.task: asyncio.Task[None] | None = None
        self.record = WorkerRecord(order, host)
        self.body = WorkerProcess(order.worker, host.spares, self.record.printed)
        self._host = host
        self._spec = order.spec
        self._role = PipelineMembership(
            order,
            host.address,
            host.relays,
            note=lambda text: self.record.say("system", text),
            changed=lambda: self._publish(self.state),
        )
        self.equipment = WorkerResources(order, host, self._role, self.body)
        self._drain_until_s: float | None = None
        self._begun = False
        self._ending = False
        self._fetched: dict[str, int] = {}
        self._end_way_out: Callable[[], None] = lambda: None

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
                self.equipment.secrets = self._host.opener.open(self.order)
                self.record.redactor = Redactor(self.equipment.secrets.values())
                bundle_dir = await self.equipment.prepare()
                await self.equipment.assign(bundle_dir)
                await self._until_ready()
        except TimeoutError as error:
            raise StartFailed(
                f"the worker was not ready after {timeout_s:g} s",
                hint="fs logs shows how far it came; start_timeout_s is the limit",
            ) from error

    async def _until_ready(self) -> None:
        while True:
            match await self.body.events.get():
                case Pooled(started_ns=started_ns):
                    self.equipment.forked(started_ns)
                case EgressListener():
                    self._let_out()
                case WantChunks(first=first, last=last):
                    self.equipment.first(first, last)
                case Consolidated():
                    self._role.whole = True
                case Ready(timeline=timeline):
                    self._became_ready(timeline)
                    return
                case StartError(error=info, timeline=timeline):
                    self._started(timeline)
                    raise self._root_cause(info)
                case ChannelEnded():
                    status = await self.body.exit_status()
                    raise self._why(status)
                case ProcessExited(status=status):
                    raise self._why(status)
                case _:
                    pass

    def _let_out(self) -> None:
        """To what its function's list names."""
        process = self.body.process
        if process is None or not self._spec.egress or (descriptor := process.take_outlet()) is None:
            return  # its function's own doing: what it sent is closed with the process
        listener = socket.socket(fileno=descriptor)
        self._end_way_out = self._host.egress.open(
            listener, self._spec.egress, lambda text: self.record.say("system", text)
        )
        if "net" not in process.isolation.split(","):
            self.record.say(
                "system",
                "network: this node cannot give a worker a network of its own: the list binds "
                "only what goes through the proxy",
            )

    def _started(self, timeline: Timeline) -> None:
        """Whether it is ready or has failed: its start is over."""
        self._fetched = self.equipment.fetched
        self.record.started(self.equipment.assigned_ns, self.equipment.fetched_ns(self.record.seen_ns), timeline)

    def _became_ready(self, timeline: Timeline) -> None:
        self._started(timeline)
        self._publish("ready")
        self.record.ready(self.equipment.assigned_ns)
        self._grow()

    def _grow(self) -> None:
        if self.state == "ready":
            self.equipment.grow()

    def _became_whole(self) -> None:
        if self._role.whole:
            return  # its function's own doing
        self._role.whole = True
        self.record.whole()
        self._publish(self.state)

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
                self.record.say("system", "worker did not end in its time to drain: killed")
                return
            match event:
                case Usage() as usage:
                    self.record.used(usage)
                case WantChunks(first=first, last=last):
                    self.equipment.first(first, last)
                case Consolidated():
                    self._became_whole()
                case ChannelEnded():
                    self._require_draining(await self.body.exit_status())
                    return
                case ProcessExited(status=status):
                    self._require_draining(status)
                    return
                case _:
                    pass

    def _require_draining(self, status: int | None) -> None:
        if self._drain_until_s is None and not (self.order.shell and status == exits.DRAINED):
            raise self._why(status)

    # ── its end ────────────────────────────────────────────────────────────────────────────────────

    async def _end(self, error: FleetError | None) -> None:
        ended_ns = time.monotonic_ns()
        was_ready, assigned_ns = self.record.was_ready, self.equipment.assigned_ns
        if error is not None and self.body.process is not None and assigned_ns and not was_ready:
            await self.body.exit_status()  # its last words belong before ours
        info = self.record.redacted(error.info()) if error is not None else None
        if info is not None:
            self.record.say("system", f"worker {'ended' if was_ready else 'failed to start'}: {info.message}")
            log.warning(
                "worker ended by itself" if was_ready else "worker failed to start",
                extra={
                    "worker": self.order.worker,
                    "function": self._spec.name,
                    "error": info.message,
                    **({"request": self.order.cause} if self.order.cause and not was_ready else {}),
                },
            )
        self._publish("failed" if info is not None else "gone", info)
        self.record.ended((assigned_ns or self.record.seen_ns, ended_ns), failed=error is not None)
        await self.body.bury()
        self._end_way_out()
        self._role.close()
        self.equipment.release()

    def _why(self, status: int | None) -> FleetError:
        if not self.body.ran_out_of_memory and (error := self.equipment.segment_error) is not None:
            return error
        return self.body.why(status, limit_bytes=self._spec.memory_bytes, was_ready=self.record.was_ready)

    def _root_cause(self, info: ErrorInfo) -> FleetError:
        """A worker that could not get its weights says so; why, the segment knows best."""
        return self.equipment.segment_error or error_from(info)

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
                start="cold" if self.equipment.cold else "warm",
                pooled=self.equipment.pooled,
                isolation=self.body.process.isolation if self.body.process is not None else "",
                endpoint=self.equipment.endpoint if called else "",
                token=self.equipment.token if called else "",
                link=self._role.link,
                whole=self._role.whole,
                relayed=self._role.relayed,
                fetched=self._fetched,
                error=error,
                timeline=self.record.timeline,
                changed_unix_ns=time.time_ns(),
                shell=self.order.shell,
            )
        )
