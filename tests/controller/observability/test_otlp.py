"""Spans at a real receiver of OTLP over HTTP, and the trace context on its way through."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.timeline import Timeline
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import AppServer, RedisServer, serving, wait_until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Decodes what is posted, as a collector does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[str, Span]] = []
        self.paths: set[str] = set()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        request = ExportTraceServiceRequest.FromString(bytes(body))
        with self._lock:
            self.paths.add(scope["path"])
            for resource in request.resource_spans:
                names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
                self._spans += [(names["service.name"], s) for scoped in resource.scope_spans for s in scoped.spans]
        head = [(b"content-type", b"application/x-protobuf"), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b""})

    def of(self, trace_id: str) -> dict[str, tuple[str, Span]]:
        with self._lock:
            return {span.name: (service, span) for service, span in self._spans if span.trace_id.hex() == trace_id}


@pytest.fixture
def collector() -> Iterator[tuple[Collector, AppServer]]:
    receiver = Collector()
    with serving(receiver) as server:
        yield receiver, server


@pytest.fixture
def traced(
    collector: tuple[Collector, AppServer], redis_url: str, redis_server: RedisServer, tmp_path: Path
) -> Iterator[ControllerProcess]:
    process = ControllerProcess(tmp_path / "home", redis_url, FS_OTLP_ENDPOINT=collector[1].url)
    node = HandNode(redis_server).start()
    node.answer = cold
    try:
        yield process.start()
    finally:
        node.close()
        process.close()


def cold(node: HandNode, order: WorkerOrder) -> None:
    if order.wanted == "drain":
        node.say(order, "gone")
        return
    timeline = Timeline()
    for phase in ("start", "fetch", "load"):
        with timeline.span(phase):
            pass
    node.ready(order, start="cold", timeline=timeline)


def test_one_call_is_one_trace_through_gateway_node_and_worker(
    traced: ControllerProcess, collector: tuple[Collector, AppServer]
) -> None:
    receiver, _ = collector
    traced.deploy("f")
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    seen = traced.http.post("/fn/f", headers=headers).json()["headers"]
    assert seen["tracestate"] == "vendor=1"
    version, trace_id, attempt_id, flags = seen["traceparent"].split("-")
    assert (version, trace_id, flags) == ("00", TRACE, "01")
    wait_until(lambda: "execute" in receiver.of(TRACE), what="spans")
    found = receiver.of(TRACE)
    assert receiver.paths == {"/v1/traces"}
    root, attempt = found["invoke f"][1], found["attempt"][1]
    assert root.parent_span_id.hex() == PARENT
    assert root.trace_state == "vendor=1"
    assert root.kind == Span.SPAN_KIND_SERVER
    assert attempt.span_id.hex() == attempt_id, "what the handler does hangs below the attempt"
    assert attempt.parent_span_id == root.span_id
    services = {name: service for name, (service, _) in found.items()}
    assert services == {
        "invoke f": "fleetstart-gateway", "queue": "fleetstart-gateway", "place": "fleetstart-gateway",
        "start": "fleetstart-node", "fetch": "fleetstart-node", "load": "fleetstart-worker",
        "attempt": "fleetstart-gateway", "execute": "fleetstart-worker",
    }  # fmt: skip
    attributes = {pair.key: pair.value for pair in root.attributes}
    row = wait_until(lambda: traced.rows("f"), what="the row")[0]
    assert attributes["fleetstart.invocation"].string_value == row["id"]
    assert attributes["http.response.status_code"].int_value == 200
    trace = traced.http.get(f"/api/v1/invocations/{row['id']}").json()
    assert trace["context"]["trace_id"] == TRACE
    begun_ns = min(phase["started_ns"] for phase in trace["timeline"]["phases"])
    assert root.start_time_unix_nano == trace["timeline"]["origin_unix_ns"] + begun_ns


def test_a_trace_begins_here_without_one_and_failures_are_marked(
    traced: ControllerProcess, collector: tuple[Collector, AppServer]
) -> None:
    receiver, _ = collector
    traced.deploy("f")
    assert traced.http.post("/fn/f/drop", headers={"traceparent": "nonsense"}).status_code == 502
    row = wait_until(lambda: traced.rows("f"), what="the row")[0]
    trace_id = traced.http.get(f"/api/v1/invocations/{row['id']}").json()["context"]["trace_id"]
    wait_until(lambda: "invoke f" in receiver.of(trace_id), what="spans")
    root = receiver.of(trace_id)["invoke f"][1]
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert root.parent_span_id == b""


def test_what_its_caller_does_not_sample_is_not_sent(
    traced: ControllerProcess, collector: tuple[Collector, AppServer]
) -> None:
    receiver, _ = collector
    traced.deploy("f")
    seen = traced.http.post("/fn/f", headers={"traceparent": f"00-{TRACE}-{PARENT}-00"}).json()["headers"]
    assert seen["traceparent"].startswith(f"00-{TRACE}-")
    assert seen["traceparent"].endswith("-00")
    other = "1" * 32
    traced.http.post("/fn/f", headers={"traceparent": f"00-{other}-{PARENT}-01"})
    wait_until(lambda: receiver.of(other), what="the later call's spans")
    assert receiver.of(TRACE) == {}


def test_calls_do_not_wait_for_a_collector_that_is_not_there(
    redis_url: str, redis_server: RedisServer, tmp_path: Path
) -> None:
    process = ControllerProcess(tmp_path / "home", redis_url, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    node = HandNode(redis_server).start()
    try:
        process.start().deploy("f")
        for _ in range(20):
            assert process.http.post("/fn/f").status_code == 200
    finally:
        node.close()
        process.close()
