"""Sends the spans of ended invocations to a collector, by OTLP over HTTP, from a thread of its own.

Only where an endpoint is named (FS_OTLP_ENDPOINT or OpenTelemetry's own variables): else the packages are not even
imported. Calls never wait for it; traces beyond the queue of a slow or absent collector are dropped, and counted.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from secrets import token_hex

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from fleetstart.runtime.contract.billing.ledger import InvocationTrace

from .prometheus import MetricFamily
from .spans import Kind, Service, Span, spans_of

log = logging.getLogger(__name__)

WAITING_MAX = 4096
BATCH_TRACES = 256
BATCH_S = 0.2
"""Invocations that end within it are sent in one request."""
TIMEOUT_S = 5.0
LAST_S = 2.0
"""Timeout for the traces that are left when the controller ends."""

_KINDS: dict[Kind, SpanKind] = {
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "internal": SpanKind.INTERNAL,
}
_SCOPE = InstrumentationScope("fleetstart")


class TraceExport:
    def __init__(self, endpoint: str) -> None:
        """`endpoint` is where spans are posted, as a whole URL. Headers come from OpenTelemetry's variables."""
        # The library's own lines about each failed request would drown ours.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT_S)
        self._waiting: queue.Queue[InvocationTrace | None] = queue.Queue(WAITING_MAX)
        self._counts: Counter[str] = Counter()
        self._resources = {name: _resource(name) for name in ("gateway", "node", "worker")}
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def ended(self, trace: InvocationTrace) -> None:
        if not trace.context.sampled or not trace.timeline.phases:
            return
        try:
            self._waiting.put_nowait(trace)
        except queue.Full:
            self._counts["dropped"] += 1

    def families(self) -> list[MetricFamily]:
        family = MetricFamily("fleetstart_exported_invocations_total", "counter", "Exported traces by outcome.")
        for outcome in ("sent", "failed", "dropped"):
            family.add(self._counts[outcome], outcome=outcome)
        return [family]

    def close(self) -> None:
        """Sends the traces that wait, for LAST_S at most; blocks."""
        try:
            self._waiting.put_nowait(None)
            self._thread.join(LAST_S)
        except queue.Full:
            log.warning("traces dropped at shutdown", extra={"traces": self._waiting.qsize()})
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    # ── its thread ─────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while True:
            batch, more = self._batch()
            if batch:
                self._send(batch)
            if not more:
                return

    def _batch(self) -> tuple[list[InvocationTrace], bool]:
        """Waits for a batch; the flag is False if it is the last one."""
        batch: list[InvocationTrace] = []
        ends_s = 0.0
        while len(batch) < BATCH_TRACES:
            try:
                trace = self._waiting.get(timeout=max(0.001, ends_s - time.monotonic()) if batch else None)
            except queue.Empty:
                break
            if trace is None:
                return batch, False
            ends_s = ends_s or time.monotonic() + BATCH_S
            batch.append(trace)
        return batch, True

    def _send(self, batch: Sequence[InvocationTrace]) -> None:
        try:
            spans = [self._span(trace, span) for trace in batch for span in spans_of(trace, lambda: token_hex(8))]
            sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:
            log.exception("traces could not be sent")
            sent = False
        self._counts["sent" if sent else "failed"] += len(batch)
        if sent == self._failing:
            self._failing = not sent
            log.warning(
                "the trace collector accepts traces again" if sent else "the trace collector does not accept traces"
            )

    def _span(self, trace: InvocationTrace, span: Span) -> ReadableSpan:
        state = TraceState.from_header([trace.context.state]) if trace.context.state else None
        parent = None
        if span.parent_id:
            parent = _context(span.trace_id, span.parent_id, state, remote=span.parent_id == trace.context.parent_id)
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace_id, span.span_id, state, remote=False),
            parent=parent,
            resource=self._resources[span.service],
            attributes=span.attributes,
            kind=_KINDS[span.kind],
            instrumentation_scope=_SCOPE,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=span.started_unix_ns,
            end_time=span.ended_unix_ns,
        )


def _resource(service: Service | str) -> Resource:
    return Resource({"service.name": f"fleetstart-{service}", "service.namespace": "fleetstart"})


def _context(trace_id: str, span_id: str, state: TraceState | None, *, remote: bool) -> SpanContext:
    return SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=remote, trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=state,
    )  # fmt: skip
