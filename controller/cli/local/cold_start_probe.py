"""Cold start probe of `fs dev --cold`: calls a function at zero, and compares the timeline with the last one.

The system of `fs dev --cold` keeps neither idle workers nor idle weights, so it is at zero soon after each call.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import click
import msgspec

from fleetstart.runtime.contract.billing.ledger import InvocationTrace
from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import NotFound, Unavailable
from fleetstart.runtime.contract.ids import InvocationId
from fleetstart.runtime.contract.timeline import Phase
from fleetstart.runtime.contract.worker_headers import REQUEST_HEADER

from ...schemas.functions import FunctionInfo, SystemStatus
from .. import output
from ..api_client import ApiClient, function_path
from ..waterfall import compare_timelines, render_trace, trace_summary

ZERO_S = 60.0
"""How long to wait for scale to zero: a worker that ends may have files and connections to close."""
TRACE_S = 10.0
"""How long a trace may be missing after the call's answer."""
CALL_S = 600.0
POLL_S = 0.05


@dataclass(slots=True, kw_only=True)
class ColdStartProbe:
    """Makes one call from zero at a time. `path` and `body` are the call's; `body` is JSON, or @ and a file's name."""

    server: ApiClient
    path: str
    body: str
    as_json: bool
    _last: dict[str, InvocationTrace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _content(self.body)  # so that an error in it is raised at once

    def probe(self, name: str) -> None:
        """Calls a function from zero, and prints its timeline, also of an error answer. Errors: FleetError."""
        _wait_for_zero(self.server, name)
        trace = self._called(name)
        before, self._last[name] = self._last.get(name), trace
        if self.as_json:
            output.json_line(trace)
            return
        width = shutil.get_terminal_size((100, 24)).columns
        if before is None:
            output.data(render_trace(trace, width=width))
            return
        now_ms, before_ms = span_ms(trace.timeline.phases), span_ms(before.timeline.phases)
        chart = compare_timelines(before.timeline.phases, trace.timeline.phases, width=width)
        output.data(f"{trace_summary(trace)}\n\n{chart}\n")
        output.data(f"{now_ms:.1f} ms from zero, before {before_ms:.1f} ms: {now_ms - before_ms:+.1f} ms")

    def _called(self, name: str) -> InvocationTrace:
        """Calls the function. A body's file is read at each call, since it may have changed."""
        path = self.path if self.path.startswith(("/", "?")) or not self.path else f"/{self.path}"
        target = f"/fn/{quote(name, safe='')}{path}"
        headers = {"content-type": "application/json"}
        with self.server.connection_errors():
            answer = self.server.http.post(target, content=_content(self.body), headers=headers, timeout=CALL_S)
        return _trace(self.server, InvocationId(answer.headers[REQUEST_HEADER]))


def span_ms(phases: list[Phase]) -> float:
    """Duration from the first phase's start to the last phase's end."""
    if not phases:
        return 0.0
    return (max(phase.ended_ns for phase in phases) - min(phase.started_ns for phase in phases)) / 1e6


def _content(body: str) -> bytes:
    """Errors: NotFound, click.UsageError."""
    if body.startswith("@"):
        try:
            return Path(body[1:]).read_bytes()
        except OSError as error:
            raise NotFound(f"no file {body[1:]}: {error}") from error
    try:
        msgspec.json.decode(body)
    except UNDECODABLE as error:
        raise click.UsageError(f"--body is not JSON: {error}") from error
    return body.encode()


def _trace(server: ApiClient, call: InvocationId) -> InvocationTrace:
    ends_s = time.monotonic() + TRACE_S
    while True:
        try:
            return server.get(f"/api/v1/invocations/{call}", InvocationTrace)
        except NotFound:
            if time.monotonic() > ends_s:
                raise
        time.sleep(POLL_S)


def _wait_for_zero(server: ApiClient, name: str) -> None:
    """Waits until the function has no worker and no weights in memory, and its fork server runs, as in a system that
    has been up for a while. Errors: Unavailable."""
    ends_s = time.monotonic() + ZERO_S
    while True:
        info = server.get(function_path(name), FunctionInfo)
        nodes = server.get("/api/v1/status", SystemStatus, functions="none").nodes
        workers, segments = info.workers, [one for node in nodes for one in node.segments]
        if not workers and not segments and any(info.spec.profile in node.profiles for node in nodes):
            return
        if time.monotonic() > ends_s:
            left = f"{len(workers)} workers and {len(segments)} checkpoints in memory"
            raise Unavailable(f"{name} is not at zero after {ZERO_S:g} s: {left}", hint="a call may still be running")
        time.sleep(POLL_S)
