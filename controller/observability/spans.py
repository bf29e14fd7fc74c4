"""Converts an invocation's timeline to the spans of a trace. Pure: no second clock, no second instrument.

invoke NAME                      gateway, under the caller's span if there is one
├── queue                        gateway
│   ├── place                    gateway
│   ├── start, fetch             node
│   └── device, import, load     worker
├── attempt                      gateway; the worker gets this span's id as its parent
│   ├── execute                  worker
│   └── respond                  gateway
└── move                         gateway
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fleetstart.runtime.contract.billing.ledger import InvocationTrace
from fleetstart.runtime.contract.timeline import Phase, PhaseName

Service = Literal["gateway", "node", "worker"]
Kind = Literal["server", "client", "internal"]
Attribute = str | int | bool

SERVICES: dict[PhaseName, Service] = {
    "start": "node",
    "fetch": "node",
    "device": "worker",
    "import": "worker",
    "load": "worker",
    "execute": "worker",
}
"""The service that does each phase; the gateway does the others."""
START: frozenset[PhaseName] = frozenset({"place", "start", "fetch", "device", "import", "load"})
ATTEMPT: frozenset[PhaseName] = frozenset({"execute", "respond"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    name: str
    service: Service
    kind: Kind
    trace_id: str
    span_id: str
    parent_id: str
    """Empty if there is none."""
    started_unix_ns: int
    ended_unix_ns: int
    attributes: dict[str, Attribute]
    error: str = ""


def spans_of(trace: InvocationTrace, new_id: Callable[[], str]) -> list[Span]:
    """The root first. None without phases: its gateway died before it could tell any."""
    phases = trace.timeline.phases
    if not phases or not trace.context.trace_id:
        return []
    draw = _SpanBuilder(trace, new_id)
    root = draw.span(f"invoke {trace.row.function}", phases, parent_id=trace.context.parent_id, kind="server",
                     attributes=_call(trace), error=_error(trace))  # fmt: skip
    spans = [root]
    queued = [phase for phase in phases if phase.name == "queue"]
    waited = draw.span("queue", queued, parent_id=root.span_id) if queued else root
    spans += [waited] if queued else []
    spans += [draw.phase(phase, waited.span_id) for phase in phases if phase.name in START]
    tried = [phase for phase in phases if phase.name in ATTEMPT]
    if tried:
        attempt = draw.span("attempt", tried, parent_id=root.span_id, kind="client", span_id=trace.context.span_id,
                            attributes={"fleetstart.attempts": trace.row.attempts}, error=_error(trace))  # fmt: skip
        spans += [attempt, *(draw.phase(phase, attempt.span_id) for phase in tried)]
    spans += [draw.phase(phase, root.span_id) for phase in phases if phase.name == "move"]
    return spans


class _SpanBuilder:
    def __init__(self, trace: InvocationTrace, new_id: Callable[[], str]) -> None:
        self._trace = trace
        self._new_id = new_id

    def span(
        self,
        name: str,
        phases: list[Phase],
        *,
        parent_id: str,
        service: Service = "gateway",
        kind: Kind = "internal",
        span_id: str = "",
        attributes: dict[str, Attribute] | None = None,
        error: str = "",
    ) -> Span:
        """Around all of the phases."""
        origin_ns = self._trace.timeline.origin_unix_ns
        return Span(
            name=name,
            service=service,
            kind=kind,
            trace_id=self._trace.context.trace_id,
            span_id=span_id or self._new_id(),
            parent_id=parent_id,
            started_unix_ns=origin_ns + min(phase.started_ns for phase in phases),
            ended_unix_ns=origin_ns + max(phase.ended_ns for phase in phases),
            attributes={"fleetstart.invocation": self._trace.row.id, **(attributes or {})},
            error=error,
        )

    def phase(self, phase: Phase, parent_id: str) -> Span:
        service = SERVICES.get(phase.name, "gateway")
        attributes: dict[str, Attribute] = {}
        if service != "gateway":
            attributes = {"fleetstart.worker": self._trace.row.worker, "fleetstart.node": self._trace.node}
        if phase.name == "fetch":
            attributes |= {f"fleetstart.fetched.{name}": size for name, size in self._trace.fetched.items()}
        kind: Kind = "server" if phase.name == "execute" else "internal"
        return self.span(phase.name, [phase], parent_id=parent_id, service=service, kind=kind, attributes=attributes)


def _call(trace: InvocationTrace) -> dict[str, Attribute]:
    row = trace.row
    return {
        "fleetstart.function": row.function,
        "fleetstart.version": row.version,
        "fleetstart.start": row.start,
        "fleetstart.worker": row.worker,
        "fleetstart.billed_ms": row.billed_ms,
        "fleetstart.cost_nusd": row.cost_nusd,
        "http.response.status_code": row.status,
        **({"error.type": row.error} if row.error else {}),
    }


def _error(trace: InvocationTrace) -> str:
    """The error of a server span: 5xx; a 4xx is the caller's."""
    row = trace.row
    return (row.error or f"HTTP {row.status}") if row.status >= 500 else ""
