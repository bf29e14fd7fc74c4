"""Calls through a real controller to workers that keep the contract."""

from __future__ import annotations

import http.client
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.timeline import Timeline
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import wait_until


def test_a_cold_call_orders_a_worker_and_is_answered(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    sent = {"x-request-id": "req-1", "fs-scheduled-at": "forged"}
    answer = controller.http.post("/fn/hello/a%20b/c?x=1&y=%2F", content=b"body", headers=sent)
    assert answer.status_code == 200, answer.text
    echo = answer.json()
    assert (echo["raw_path"], echo["query"], echo["method"], echo["body"]) == ("/a%20b/c", "x=1&y=%2F", "POST", "body")
    assert echo["headers"]["x-request-id"] == answer.headers["x-request-id"]
    assert "fs-scheduled-at" not in echo["headers"]
    assert answer.headers["x-request-id"].startswith("inv-")
    assert answer.headers["fs-version"] == "1"
    assert answer.headers["fs-start"] == "warm"
    assert answer.headers["fs-billed-ms"].isdigit()
    assert answer.headers["fs-cost"] != "spoofed"
    assert "queue;dur=" in answer.headers["server-timing"]
    assert answer.headers["x-own"] == "1"
    assert controller.http.get("/fn/hello").headers["fs-start"] == "hot"
    assert len(node.ordered()) == 1
    rows = wait_until(lambda: rows if len(rows := controller.rows("hello")) == 2 else [])
    assert [row["status"] for row in rows] == [200, 200]


def test_a_start_that_was_waited_for_stands_on_the_timeline(controller: ControllerProcess, node: HandNode) -> None:
    def answer(node: HandNode, order: Any) -> None:
        timeline = Timeline()
        now_ns = time.monotonic_ns()
        timeline.add("start", now_ns - 3_600_000_000_000, now_ns + 2_000_000)
        node.ready(order, start="cold", timeline=timeline)

    node.answer = answer
    controller.deploy("hello")
    answered = controller.http.get("/fn/hello", headers={"x-request-id": "traced"})
    assert answered.headers["fs-start"] == "cold"
    trace = wait_until(lambda: _ok(controller.http.get("/api/v1/invocations/traced")))
    phases = {phase["name"]: phase for phase in trace["timeline"]["phases"]}
    assert phases.keys() >= {"queue", "place", "start", "execute"}
    assert phases["start"]["started_ns"] >= phases["queue"]["started_ns"], "what was before the call is not the call's"


def _ok(answer: httpx.Response) -> Any:
    return answer.json() if answer.status_code == 200 else None


def test_ten_calls_to_a_cold_function_order_one_worker(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("wide", concurrency=10)
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: controller.http.get("/fn/wide/sleep?s=0.2"), range(10)))
    assert [answer.status_code for answer in answers] == [200] * 10
    assert len(node.ordered()) == 1
    assert next(iter(node.apps.values())).most <= 10
    billed = [int(answer.headers["fs-billed-ms"]) for answer in answers]
    assert sum(billed) < 10 * 200, "calls side by side share the worker's time"


def test_calls_beyond_concurrency_order_more_up_to_max(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("narrow", scale={"max": 3})
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: controller.http.get("/fn/narrow/sleep?s=0.3"), range(6)))
    assert [answer.status_code for answer in answers] == [200] * 6
    assert len(node.ordered()) == 3
    assert all(app.most == 1 for app in node.apps.values())


def test_an_unknown_function_suggests_the_nearest(controller: ControllerProcess) -> None:
    controller.deploy("hello")
    answer = controller.http.get("/fn/helo")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
    assert "hello" in answer.json()["error"]["hint"]
    assert answer.headers["fs-error"] == "not_found"
    assert controller.http.get("/fn/hello@7").status_code == 404
    assert controller.http.get("/fn/hello@x").status_code == 404


def test_a_version_may_be_named(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    controller.deploy("hello", env={"A": "2"})
    assert controller.http.get("/fn/hello").headers["fs-version"] == "2"
    assert controller.http.get("/fn/hello@1").headers["fs-version"] == "1"
    assert controller.http.get("/fn/hello@live").headers["fs-version"] == "2"
    wait_until(lambda: [o for o in node.ordered("drain") if o.version == 1], what="version 1 drained")


def test_a_version_that_is_live_no_more_answers_a_call_whose_body_comes_slowly(
    controller: ControllerProcess, node: HandNode
) -> None:
    """Nobody needs an old version that has no worker and no call; but one was on its way."""
    controller.deploy("hello")
    controller.deploy("hello", timeout_s=20)
    controller.deploy("other")
    port = int(controller.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(b"POST /fn/hello@1 HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n01234")
        assert controller.http.get("/fn/other").status_code == 200  # changes what the gateway knows, as any start does
        sock.sendall(b"56789")
        assert sock.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_declared_huge_body_is_refused_unread(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    port = int(controller.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(b"POST /fn/hello HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1073741824\r\n\r\n")
        head = sock.recv(65536)
    assert head.startswith(b"HTTP/1.1 413"), head
    assert b"too_large" in head
    assert not node.orders


def test_an_undeclared_huge_body_is_refused_while_it_comes(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    sent = 0

    def pieces() -> Any:
        nonlocal sent
        for _ in range(1024):
            sent += MIB
            yield bytes(MIB)

    try:
        answer = controller.http.post("/fn/hello", content=pieces())
        assert answer.status_code == 413
    except httpx.WriteError:
        pass  # the door was shut while we were still writing
    assert sent < 200 * MIB
    assert not node.orders
    assert controller.http.get("/fn/hello").status_code == 200


def test_a_client_that_waits_for_leave_to_send_is_told_why_it_is_refused(
    controller: ControllerProcess, node: HandNode
) -> None:
    controller.deploy("hello")
    port = int(controller.url.rsplit(":", 1)[1])
    waits = b"Host: localhost\r\nExpect: 100-continue\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(b"POST /fn/nobody HTTP/1.1\r\n" + waits + b"Content-Length: 10\r\n\r\n")
        head = sock.recv(65536)
        assert head.startswith(b"HTTP/1.1 404 ")
        # It need not send its body now: what came next would be taken for that.
        assert b"\r\nconnection: close\r\n" in head
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(b"POST /fn/hello HTTP/1.1\r\n" + waits + b"Transfer-Encoding: chunked\r\n\r\n")
        assert sock.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        for _ in range(16):
            sock.sendall(b"%x\r\n%b\r\n" % (MIB, bytes(MIB)))
        assert sock.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_body_at_the_limit_passes(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    assert controller.http.post("/fn/hello", content=bytes(4 * MIB)).json()["size"] == 4 * MIB
    assert controller.http.post("/fn/hello", content=bytes(4 * MIB + 1)).status_code == 413


def test_the_first_event_arrives_before_the_second_is_made(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    with controller.http.stream("GET", "/fn/hello/gate") as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == b"data: first\n\n"
        next(iter(node.apps.values())).release.set()
        rest = b"".join(pieces)
    second, closing, _ = rest.split(b"\n\n")
    assert second == b"data: second"
    name, _, data = closing.partition(b"\n")
    assert name == b"event: fleetstart"
    bill = json.loads(data.removeprefix(b"data: "))
    assert bill["start"] == "warm"
    assert bill["billed_ms"] >= 0
    assert bill["request_id"] == answer.headers["x-request-id"]
    assert "respond" in bill["server_timing"]


def test_chunks_that_are_no_events_pass_unchanged(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    assert controller.http.get("/fn/hello/chunks").content == b"one two"
    assert controller.http.head("/fn/hello").status_code == 200
    assert controller.http.options("/fn/hello").json()["method"] == "OPTIONS"


def test_a_response_without_content_has_no_length(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    for status in (204, 304):
        answer = controller.http.get(f"/fn/hello/status?{status}")
        assert (answer.status_code, answer.content) == (status, b"")
        assert "content-length" not in answer.headers


def test_a_worker_cannot_switch_the_protocol_of_its_caller(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    answer = controller.http.get("/fn/hello/status?101")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "handler_error")
    assert "HTTP 101" in answer.json()["error"]["message"]
    assert controller.http.get("/fn/hello").status_code == 200


def test_a_client_that_leaves_cancels_its_call(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    controller.http.get("/fn/hello")
    app = next(iter(node.apps.values()))
    connection = http.client.HTTPConnection("127.0.0.1", httpx.URL(controller.url).port, timeout=20)
    connection.request("GET", "/fn/hello/hold", headers={"x-request-id": "left"})
    wait_until(lambda: app.running, what="a call on the worker")
    connection.close()
    wait_until(lambda: app.cancelled, what="cancelled on the worker")
    [row] = wait_until(lambda: [r for r in controller.rows("hello") if r["request_id"] == "left"])
    assert (row["status"], [row["id"]]) == (499, app.cancelled)
    assert controller.http.get("/fn/hello").status_code == 200


def test_a_call_that_goes_on_without_its_client_keeps_its_slot_and_is_billed(
    controller: ControllerProcess, node: HandNode
) -> None:
    """As a thread does, or an app that does not listen. Its worker has no slot for the next call, which would wait."""
    controller.deploy("hello", scale={"max": 2})
    controller.http.get("/fn/hello")
    app = next(iter(node.apps.values()))
    connection = http.client.HTTPConnection("127.0.0.1", httpx.URL(controller.url).port, timeout=20)
    connection.request("GET", "/fn/hello/deaf", headers={"x-request-id": "left"})
    wait_until(lambda: app.running, what="a call on the worker")
    connection.close()
    wait_until(lambda: app.asked_ends, what="the question when it ends")
    answer = controller.http.get("/fn/hello")
    assert (answer.status_code, answer.headers["fs-attempts"], len(node.ordered())) == (200, "1", 2)
    assert not [row for row in controller.rows("hello") if row["request_id"] == "left"]
    app.release.set()
    [row] = wait_until(lambda: [r for r in controller.rows("hello") if r["request_id"] == "left"])
    assert (row["status"], row["error"]) == (499, "client_gone")
    assert row["billed_ms"] == pytest.approx(row["total_ms"], abs=100)


def test_the_deadline_ends_a_call(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello", timeout_s=20)
    answer = controller.http.get("/fn/hello/hold", headers={"fs-timeout-s": "0.3"})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    wait_until(lambda: [r for r in controller.rows("hello") if r["status"] == 504])


def test_the_deadline_ends_the_wait_for_a_worker(controller: ControllerProcess, node: HandNode) -> None:
    node.answer = lambda node, order: node.say(order, "starting")
    controller.deploy("hello", timeout_s=0.4)
    answer = controller.http.get("/fn/hello")
    assert answer.status_code == 504
    assert "waited for a worker" in answer.json()["error"]["message"]


def test_after_the_keep_alive_there_is_no_worker(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello", scale={"keep_alive_s": 0.5})
    controller.http.get("/fn/hello")
    wait_until(lambda: node.ordered("drain"), what="drained")
    wait_until(lambda: not controller.http.get("/api/v1/functions/hello").json()["workers"])
    assert controller.http.get("/fn/hello").status_code == 200
    assert len(node.ordered()) == 2


def test_min_workers_are_there_before_anybody_calls(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("ready", scale={"min": 2, "max": 2})
    wait_until(lambda: len(node.apps) == 2)
    assert controller.http.get("/fn/ready").headers["fs-start"] == "hot"


def test_each_run_has_its_row_and_its_bill_whatever_id_its_caller_gave(
    controller: ControllerProcess, node: HandNode
) -> None:
    controller.deploy("hello")
    answers = [controller.http.get("/fn/hello", headers={"x-request-id": "same"}) for _ in range(3)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    rows = wait_until(lambda: found if len(found := controller.rows("hello")) == 3 else [])
    assert sorted(row["id"] for row in rows) == sorted(ids)
    assert [row["request_id"] for row in rows] == ["same"] * 3
    assert sum(row["billed_ms"] for row in rows) == sum(int(answer.headers["fs-billed-ms"]) for answer in answers)
    assert controller.http.get("/api/v1/invocations/same").json()["row"]["id"] == ids[-1], "found by either id"


def test_hostile_request_ids_are_dropped(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    for hostile in ("", "a b", "x" * 129, "../../etc", "\x80"):
        headers = {b"x-request-id": hostile.encode("latin-1")}
        answered = controller.http.get("/fn/hello", headers=headers)
        assert answered.headers["x-request-id"].startswith("inv-")
    rows = wait_until(lambda: found if len(found := controller.rows("hello")) == 5 else [])
    assert {row["request_id"] for row in rows} == {""}


def test_a_deleted_function_is_gone_and_its_workers_are_drained(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    controller.http.get("/fn/hello")
    assert controller.http.delete("/api/v1/functions/hello").status_code == 200
    assert controller.http.get("/fn/hello").status_code == 404
    wait_until(lambda: node.ordered("drain"))
    assert controller.deploy("hello", env={"B": "1"})["version"] == 2, "numbers are never used again"
