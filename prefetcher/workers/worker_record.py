"""The record of a worker: the timeline of its start, its time in the ledger, and its log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from fleetstart.runtime.contract.billing.ledger import PhaseRow
from fleetstart.runtime.contract.billing.prices import PriceSheet
from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.node.messages import Usage
from fleetstart.runtime.contract.node.orders import SecondEngine, WorkerOrder
from fleetstart.runtime.contract.process.redaction import Redactor
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.timeline import Timeline, machine_origin_ns

from ..processes.consumption import Consumption, ConsumptionMeter
from ..processes.worker_logs import Stream, parse_tagged_line
from .meter import WorkerMeter
from .node_services import NodeServices

log = logging.getLogger(__name__)

SECOND_NAME_MAX = 32
SECOND_ERROR_MAX = 500


class WorkerRecord:
    """The record of one worker, from the moment its order was seen."""

    def __init__(self, order: WorkerOrder, services: NodeServices, consumption: Callable[[], Consumption]) -> None:
        """`consumption`: what the worker has used until now."""
        self.seen_ns = time.monotonic_ns()
        self.timeline = Timeline()
        self.redactor = Redactor()
        """Redacts the worker's secrets, once they are known, in everything that is written."""
        self.second_engine: SecondEngine | None = None
        """The engine behind its first one, as the worker says it."""
        self._order = order
        self._services = services
        self._meter = WorkerMeter(_template(order, services), machine_origin_ns())
        self._consumption = consumption
        self.consumed = ConsumptionMeter()

    @property
    def was_ready(self) -> bool:
        return self._meter.is_running

    def log_line(self, stream: Stream, text: str, invocation: str = "") -> None:
        """Writes a log line. Until the worker is ready, lines without an invocation id belong to the invocation that
        caused the start."""
        order = self._order
        whose = invocation or ("" if self.was_ready else order.cause)
        self._services.logs.write(order.spec.name, order.worker, order.version, stream, self.redactor.text(text), whose)

    def on_output(self, line: str) -> None:
        """Writes a line that the worker's process printed."""
        stream, invocation, text = parse_tagged_line(line)
        self.log_line(stream, text, invocation)

    def redacted(self, info: ErrorInfo) -> ErrorInfo:
        return msgspec.structs.replace(
            info, message=self.redactor.text(info.message), hint=self.redactor.text(info.hint)
        )

    def started(self, assigned_ns: int, fetched_ns: tuple[int, int] | None, own: Timeline) -> None:
        """Records the node's phases of the start, then the worker's own; and their ledger rows, except for what follows
        the start.

        `fetched_ns` is (begin, end) of the fetch that the start had to wait for.
        """
        self._phase("start", self.seen_ns, assigned_ns)
        if fetched_ns is not None:
            self._phase("fetch", *fetched_ns)
        self.timeline.join(own.within(self.seen_ns, time.monotonic_ns()))

    def ready(self, assigned_ns: int, pid: int = 0) -> None:
        now_ns = time.monotonic_ns()
        self._write_rows(self._meter.phase("load", assigned_ns, now_ns))
        self._meter.ready(now_ns)
        names = dict.fromkeys(phase.name for phase in self.timeline.phases)
        phases = {name: round(self.timeline.total_ms(name), 1) for name in names}
        order = self._order
        self.log_line(
            "system",
            f"{'shell' if order.shell else 'worker'} ready after {(now_ns - self.seen_ns) / 1e6:.0f} ms",
            order.cause,
        )
        caused = {"request": order.cause} if order.cause else {}
        extra = {"worker": order.worker, "function": order.spec.name, "pid": pid, "phases_ms": phases, **caused}
        log.info("worker ready", extra=extra)

    def became_whole(self) -> None:
        took_ms = (time.monotonic_ns() - self.seen_ns) / 1e6
        self.log_line("system", f"worker has the whole model {took_ms:.0f} ms after its order")

    def on_second_engine(self, second: SecondEngine) -> bool:
        """Takes what the worker says of its second engine; True if that is news for its status. User code may have
        written it, but for a language model, where there is none."""
        if self._order.spec.llm is None or not self._order.spec.llm.first:
            return False
        text = self.redactor.text(second.error)[:SECOND_ERROR_MAX]
        second = msgspec.structs.replace(second, engine=second.engine[:SECOND_NAME_MAX], error=text)
        known, self.second_engine = self.second_engine, second
        if known is not None and known.state == second.state:
            return known.moved != second.moved
        if second.state == "failed":
            self.log_line("system", f"{second.engine} did not come up, the first engine goes on: {second.error}")
        if second.state == "ready" or (second.state == "running" and (known is None or known.state != "ready")):
            self.log_line("system", f"{second.engine} came up in {second.took_ms} ms behind the first engine")
        return True

    def stood_by(self, left_bytes: int) -> None:
        self._write_rows(*self._meter.stand_by(left_bytes, time.monotonic_ns()))
        self.log_line("system", f"worker stands by: {left_bytes / MIB:.0f} MiB are left of it")

    def waking(self) -> None:
        self._write_rows(*self._meter.wake(time.monotonic_ns()))

    def woken(self, since_ns: int) -> None:
        now_ns = time.monotonic_ns()
        self._write_rows(*self._meter.woken(now_ns))
        self.timeline = Timeline()  # what a call waits for now
        self.timeline.add("load", since_ns, now_ns)
        took_ms = (now_ns - since_ns) / 1e6
        self.log_line("system", f"worker woken after {took_ms:.0f} ms")
        extra = {"worker": self._order.worker, "function": self._order.spec.name, "took_ms": round(took_ms, 1)}
        log.info("worker woken", extra=extra)

    def on_usage(self, usage: Usage, weight_bytes: int = 0) -> None:
        """`weight_bytes`: the weights that a token of a whole language model reads; 0: it is none."""
        now_ns = time.monotonic_ns()
        self._meter.busy(usage.busy_ns, now_ns)
        speed = usage.speed
        if speed is not None and not self._order.shell and speed.is_possible((now_ns - self.seen_ns) / 1e9):
            version = f"{self._order.spec.name}@{self._order.version}"
            if weight_bytes and self._services.latencies.is_new(self._order.worker, speed):
                speed = self._services.devices.stepped(self._order.worker, speed, weight_bytes)
            self._services.latencies.note(version, self._order.worker, speed)

    def set_rate(self, sheet: PriceSheet, *, kept: bool) -> None:
        """Sets the price of idle time from now on: zero, unless the worker is kept because of `min`."""
        self._write_rows(*self._meter.set_rate(sheet, time.monotonic_ns(), kept=kept))

    def flush(self) -> None:
        """Writes the time until now to the ledger."""
        self._write_rows(*self._meter.flush(time.monotonic_ns()))

    def ended(self, tried_ns: tuple[int, int], *, failed: bool) -> None:
        """Writes the rest of its time; for an attempt that never became ready, (begin, end) of the attempt."""
        if self.was_ready:
            self.flush()
        elif failed:
            self._write_rows(self._meter.phase("failed", *tried_ns))
        self._services.latencies.forget(self._order.worker)

    def _write_rows(self, *rows: PhaseRow) -> None:
        """Adds rows to the ledger, but not for a shell, which is not part of a function's cost."""
        if rows and not self._order.shell:
            self._services.ledger.add(*self.consumed.onto(rows, self._consumption()))

    def _phase(self, name: Literal["start", "fetch"], begun_ns: int, ended_ns: int) -> None:
        """Writes a phase before the load, once that has ended: what was used until then is the load's."""
        self.timeline.add(name, begun_ns, ended_ns)
        if not self._order.shell:
            self._services.ledger.add(self._meter.phase(name, begun_ns, ended_ns))


def _template(order: WorkerOrder, services: NodeServices) -> PhaseRow:
    """The common part of a worker's ledger rows."""
    device_type, device_bytes = services.devices.use_of(order.devices)
    return PhaseRow(
        id="",
        worker=order.worker,
        node=services.node,
        function=order.spec.name,
        version=order.version,
        phase="start",
        started_unix_ms=0,
        duration_ms=0,
        memory_bytes=order.spec.memory_bytes,
        device_type=device_type,
        device_bytes=device_bytes,
        tags=order.spec.tags,
        project=order.spec.project,
    )
