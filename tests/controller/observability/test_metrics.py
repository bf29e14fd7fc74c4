"""/metrics of a real controller, read with Prometheus' own parser, against the calls that were made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.timeline import Timeline
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import RedisServer, wait_until

Labels = dict[str, str]


class Read:
    """One reading."""

    def __init__(self, controller: ControllerProcess) -> None:
        answer = controller.http.get("/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        self.text = answer.text
        self.samples = [s for family in text_string_to_metric_families(answer.text) for s in family.samples]

    def value(self, name: str, **labels: str) -> float:
        return sum(
            s.value for s in self.samples if s.name == f"fleetstart_{name}" and labels.items() <= s.labels.items()
        )

    def count(self, name: str) -> int:
        return sum(sample.name == f"fleetstart_{name}" for sample in self.samples)


@pytest.fixture
def served(controller: ControllerProcess, redis_server: RedisServer) -> Iterator[ControllerProcess]:
    node = HandNode(redis_server).start()
    node.answer = answer
    try:
        yield controller
    finally:
        node.close()


def answer(node: HandNode, order: WorkerOrder) -> None:
    if order.wanted == "drain":
        node.say(order, "gone")
    elif order.spec.name == "broken":
        node.fail(order, "start_failed", "it did not start")
    else:
        timeline = Timeline()
        for phase in ("start", "fetch", "load"):
            with timeline.span(phase):
                pass
        node.ready(order, start="cold", timeline=timeline)


def test_metrics_are_what_was_called(served: ControllerProcess) -> None:
    for name in ("good", "broken"):
        served.deploy(name, retries=2)
    for path in ("/a", "/stream", "/drop", "/a"):
        served.http.post(f"/fn/good{path}", content=b"x")
    assert served.http.post("/fn/broken", content=b"x").status_code == 500
    assert served.http.get("/fn/missing").status_code == 404
    assert served.http.post("/fn/good", content=b"x" * (5 << 20)).status_code == 413
    read = Read(served)
    assert read.value("invocations_total", function="good", status="200", start="cold") == 1
    assert read.value("invocations_total", function="good", status="200") == 3
    assert read.value("invocations_total", function="good", status="502") == 1, "the worker died under it"
    assert read.value("invocation_retries_total", function="good") == 2
    assert read.value("invocation_seconds_count", function="good") == 4
    assert read.value("first_byte_seconds_count", function="good", start="cold") == 1
    for phase in ("queue", "place", "start", "fetch", "load", "execute"):
        assert read.value("cold_start_seconds_count", phase=phase, start="cold") == 1, phase
    assert read.value("invocation_errors_total", function="broken", code="start_failed") == 1
    assert read.value("worker_failures_total", function="broken", when="starting") == 3
    assert read.value("refusals_total", code="not_found") == 1
    assert read.value("refusals_total", code="too_large") == 1
    assert read.value("refusals_total", code="start_failed") == 1
    assert read.value("failed_starts", function="broken", code="start_failed") == 3
    rows = served.rows("good")
    assert read.value("billed_milliseconds_total", function="good") == sum(row["billed_ms"] for row in rows)
    assert read.value("cost_dollars_total", function="good") == pytest.approx(sum(r["cost_nusd"] for r in rows) / 1e9)


def test_what_waits_and_runs_is_a_gauge(served: ControllerProcess, redis_server: RedisServer) -> None:
    served.deploy("good", scale={"min": 0, "max": 1})
    served.http.post("/fn/good", content=b"x")
    wait_until(lambda: Read(served).value("workers", function="good", state="ready") == 1)
    read = Read(served)
    assert read.value("node_memory_bytes", node="node-1") == 4096 << 20
    assert read.value("redis_up") == 1
    assert read.value("scheduler_leader") == 1
    wait_until(lambda: Read(served).value("event_loop_lag_seconds_count"), what="the loop's lag")
    assert read.value("ttft_predictions_compared") >= 0
    assert {s.name for s in read.samples} >= {"process_resident_memory_bytes", "process_cpu_seconds_total"}
    redis_server.kill()
    wait_until(lambda: Read(served).value("redis_up") == 0, what="redis_up 0")
    assert Read(served).value("invocations_total", function="good") == 1, "metrics need no Redis"


def test_a_callers_strings_make_no_series(served: ControllerProcess) -> None:
    served.deploy("good")
    before = Read(served).count("refusals_total")
    for number in range(50):
        assert served.http.get(f"/fn/no-{number}", headers={"x-request-id": f"r-{number}"}).status_code == 404
    read = Read(served)
    assert read.count("refusals_total") <= before + 1
    assert "no-7" not in read.text


def test_a_controllers_counters_begin_with_it(redis_url: str, tmp_path: Path, redis_server: RedisServer) -> None:
    """Responses of a dead controller are in the ledger, and were in its own counters."""
    process = ControllerProcess(tmp_path / "home", redis_url).start()
    node = HandNode(redis_server).start()
    try:
        process.deploy("good")
        assert process.http.post("/fn/good").status_code == 200
        process.kill()
        process.start()
        wait_until(lambda: len(process.rows("good")) == 1, what="the row")
        assert Read(process).value("invocations_total", function="good") == 0
    finally:
        node.close()
        process.close()
